"""Makes one training run: its loop, and the parts that the loop calls."""
