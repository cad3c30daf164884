"""Two fleets for all that may happen to them, and stacks of tiny services for the launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_testing.chaos_run import chaos_fleet
from flotilla_testing.small_disk import SmallDisk, small_disk, stack_on
from flotilla_testing.stack import Stack, light_stack
from flotilla_testing.tiny_stacks import stacks

__all__ = ["stacks"]


@pytest.fixture(scope="package")
def fleet_of_faults(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three simulated generators, two reward replicas, a trainer of two ranks, coordinator, NATS."""
    with chaos_fleet(arithmetic / "model", tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    """A small disk for the state of a stack."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    try:
        with small_disk(tmp_path_factory.mktemp("full") / "state") as mounted:
            yield mounted
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(disk: SmallDisk, arithmetic: Path) -> Iterator[Stack]:
    """A stack whose state is on the small disk."""
    with stack_on(disk, arithmetic / "model") as running:
        yield running


@pytest.fixture(scope="package")
def quick(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Simulated engines and a trainer that accepts; all takes a moment, so that each phase is met."""
    sim = {"seconds_per_token": 0.02, "commit_s": 0.1}
    with light_stack(
        arithmetic / "model", tmp_path_factory.mktemp("quick"), sim=sim, trainer_s=0.1
    ) as running:
        yield running
