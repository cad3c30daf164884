"""One training run: the loop and everything that it talks to."""
