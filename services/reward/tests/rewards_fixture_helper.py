"""A module beside the user's file."""

from __future__ import annotations


def half() -> float:
    return 0.5
