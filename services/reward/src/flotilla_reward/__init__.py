"""Reward service: scores samples and steps environments."""
