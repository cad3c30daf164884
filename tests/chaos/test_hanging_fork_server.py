"""What forks the ranks hangs, and they die: the run goes on, on ranks of another fork server."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_testing.chaos_run import LIMIT_S, ChaosRun
from flotilla_testing.fault_victims import rank_of
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(600)


def test_a_gang_whose_fork_server_hangs_comes_back_from_another_one(
    fleet_of_faults: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChaosRun(fleet_of_faults, arithmetic, tmp_path) as run:
        run.wait_for_steps(2, 0, "at the start")
        old = [rank_of(fleet_of_faults, rank) for rank in (0, 1)]
        fork_server, lineage, struck = old[0].parent(), run.lineage, time.monotonic()
        assert fork_server is not None and fork_server == old[1].parent()
        fork_server.suspend()  # One that hangs tells nobody how its ranks ended.
        old[0].kill()
        wait_until("a step after the checkpoint", lambda: run.lineage > lineage, LIMIT_S)
        recovered_s = time.monotonic() - struck
        assert not any(process.is_running() for process in (fork_server, *old))
        ended = run.ends_by_itself()
        assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
        verdict = assert_accounted_for(fleet_of_faults, run.run_id)
    with capsys.disabled():
        sys.stdout.write(
            f"\n  a fork server that hangs: the next lineage after {recovered_s:.1f} s: {verdict}"
        )
