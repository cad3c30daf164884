"""One fleet for all that may happen to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_testing.chaos_run import chaos_fleet
from flotilla_testing.stack import Stack
from flotilla_testing.tiny_stacks import stacks

__all__ = ["stacks"]


@pytest.fixture(scope="package")
def fleet_of_faults(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three simulated generators, two reward replicas, a trainer of two ranks, coordinator, NATS."""
    with chaos_fleet(arithmetic / "model", tmp_path_factory.mktemp("faults")) as running:
        yield running
