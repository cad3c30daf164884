"""Generator service: one model replica that samples tokens."""
