"""Reward service: scores samples with checkers and functions of the user's."""
