"""Agents: programs of users that play episodes as clients of the gateway."""
