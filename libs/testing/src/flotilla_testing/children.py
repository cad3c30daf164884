"""Processes below the one that runs a test."""

from __future__ import annotations

import psutil


def children_that_run(words: str) -> list[psutil.Process]:
    """Return the descendants of this process whose command line holds these words; one that has ended has none."""
    return [child for child in psutil.Process().children(recursive=True) if words in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
