"""A replica of vLLM comes to a run and dies while weights arrive; the run goes on and loses nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_testing.late_replica import JOINER, joins_without_delay
from flotilla_testing.replica_faults import kill_inside
from flotilla_testing.runs import small_run
from flotilla_testing.stack import running_stack, wait_until

pytestmark = pytest.mark.timeout(600)

JOINED_STEPS = 5
LIMIT_S = 240.0


async def test_a_replica_of_vllm_joins_a_run_and_loses_no_sample_when_it_is_killed_while_weights_arrive(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small_run(arithmetic, tmp_path / "run.yaml", name="endless", steps=100_000)
    description = {"name": "vllm", "model": str(arithmetic / "model"), "generator": {"replicas": 1}}
    with running_stack(description, tmp_path) as stack:
        run = stack.ok("run", "start", str(file))
        wait_until("the first steps", lambda: len(stack.metrics(run)) >= 3, LIMIT_S)
        joins_without_delay(stack, run, tmp_path, steps=JOINED_STEPS, limit_s=LIMIT_S)
        await kill_inside(stack, JOINER, "broadcast")
        struck, done = time.monotonic(), len(stack.metrics(run))
        wait_until("five more steps", lambda: len(stack.metrics(run)) >= done + 5, LIMIT_S)
        went_on_s = time.monotonic() - struck
        stack.stop_run(run, LIMIT_S)
        verdict = assert_accounted_for(stack, run["run_id"])
    with capsys.disabled():
        sys.stdout.write(
            f"\n  a replica of vLLM, killed mid-sync: five steps in {went_on_s:.1f} s: {verdict}"
        )
