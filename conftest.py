"""Processes of tests look for garbage seldom: what they import is none, and looking took an eighth of their time."""

from __future__ import annotations

import gc

import pytest

gc.set_threshold(100_000, 20, 50)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave all that was imported out of every later look."""
    gc.collect()
    gc.freeze()
