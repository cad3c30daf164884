"""Runs whose steps a client makes."""
