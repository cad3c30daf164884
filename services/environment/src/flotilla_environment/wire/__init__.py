"""Protocols of others, spoken by hand: nothing of their packages is imported here."""
