"""Rewards that check responses by rules."""
