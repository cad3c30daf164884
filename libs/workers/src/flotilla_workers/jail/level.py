"""Levels of jails: how much of the host code is kept from, and how a user is told."""

from __future__ import annotations

from enum import IntEnum

REFUSED = "refused"
"""The isolation of a service whose host has no jail of the level that its stack demands."""


class Level(IntEnum):
    """A degree to which code in a jail is kept from the host, the strictest last."""

    NONE = 0
    """Code runs as the service itself."""
    LANDLOCK = 1
    """Code sees no file, network or process of others, but shares the host's disk and process table."""
    NAMESPACES = 2
    """Code has a file system, network and process table of its own."""

    def __str__(self) -> str:
        return self.name.lower()


def told(isolation: str) -> str:
    """Say to a user how functions run, by the name in a registration: that of a level, or REFUSED."""
    if isolation == REFUSED:
        return "functions of users are refused: flotilla doctor says why"
    as_who = ": NOT in a jail, but as the service itself" if isolation == str(Level.NONE) else ""
    return f"functions of users run at level {isolation}{as_who}"
