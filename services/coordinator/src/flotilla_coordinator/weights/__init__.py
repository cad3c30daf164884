"""Brings weights from the trainer to the generators, records what they serve, and checks it live."""
