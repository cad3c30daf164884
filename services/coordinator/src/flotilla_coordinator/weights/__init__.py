"""Weights on their way from the trainer to the generators: groups, syncs, what is served, and the live check of it."""
