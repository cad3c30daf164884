"""Evaluations on held-out data, in the loop or beside it."""
