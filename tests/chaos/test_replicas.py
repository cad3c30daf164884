"""A simulated replica comes and dies at each of its phases; the run goes on and loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_testing.coordinator_faults import endless_run
from flotilla_testing.late_replica import JOINER, joins_without_delay
from flotilla_testing.replica_faults import PHASES, kill_inside, wait_for_work
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0


@pytest.fixture
def endless(quick: Stack, arithmetic: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A run that goes on until the test is over, and accounts for every sample."""
    run = quick.ok("run", "start", str(endless_run(arithmetic, tmp_path, 0)), "weights.timeout_s=20")
    wait_until("the first steps", lambda: len(quick.metrics(run)) >= 3, WAIT_S)
    yield run
    quick.stop_run(run, WAIT_S)
    assert_accounted_for(quick, run["run_id"])


async def test_a_joiner_delays_no_step_and_one_that_is_killed_at_any_phase_loses_no_sample(
    quick: Stack, endless: dict[str, Any], tmp_path: Path
) -> None:
    joins_without_delay(quick, endless, tmp_path, steps=10, limit_s=WAIT_S)
    for phase in PHASES:
        wait_for_work(quick, endless, JOINER)
        await kill_inside(quick, JOINER, phase)
        assert_accounted_for(quick, endless["run_id"])
    wait_for_work(quick, endless, JOINER)
