"""A thousand weight syncs: under generation load, with receivers that die at random, and with vLLM killed half-way.

`FLOTILLA_LOAD_SYNCS` and `FLOTILLA_LOAD_KILLS` lower the counts for a run by hand; each test prints its figures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_coordinator.ledger.checker import Verdict
from flotilla_coordinator.ledger.records import DropReason
from flotilla_testing.many_syncs import MID_SYNC, Seen, one_in_ten, sync_figures, watch_syncs
from flotilla_testing.runs import example_rows, run_on, written
from flotilla_testing.stack import Stack, light_stack, running_stack

SYNCS = int(os.environ.get("FLOTILLA_LOAD_SYNCS", "1000"))
VLLM_KILLS = int(os.environ.get("FLOTILLA_LOAD_KILLS", "5"))
SYNCS_BETWEEN_VLLM_KILLS = 4
LIMIT_S = 7200.0
EXACT = 1e-4
PROMPTS, SAMPLES = 4, 4

pytestmark = pytest.mark.timeout(LIMIT_S + 600)


async def test_clean_syncs_under_generation_load(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real vLLM and a real trainer: every sync in the first try, every canary exact, every sample trained."""
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "1"
    )  # threads of one tiny operation would wait for each other's turn
    description = {"name": "many-syncs", "model": str(arithmetic / "model")}
    with running_stack(description, tmp_path) as stack:
        one_canary = {"weights": {"canary": {"prompts": 1}}}
        run, seen, verdict = await _run(stack, arithmetic, tmp_path, SYNCS, {}, **one_canary)
        steps = stack.metrics(run)
    _report(capsys, steps, seen, verdict)
    assert all(step["sync/epochs"] == 1 and step["sync/members"] == 1 for step in steps)
    assert max(step["canary/max"] for step in steps) < EXACT
    assert set(verdict.dropped) <= {DropReason.RUN_ENDED}, "nothing else was lost"


async def test_syncs_while_receivers_die_at_random(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three simulated receivers on the real weight group; one sync in ten loses one of them mid-way."""
    sim = {"seconds_per_token": 0.01, "commit_s": 0.05}
    kills = one_in_ten(SYNCS, seed=1)
    with light_stack(arithmetic / "model", tmp_path, replicas=3, sim=sim) as stack:
        overrides = {"weights": {"canary": {"prompts": 0}, "timeout_s": 20}}
        run, seen, verdict = await _run(stack, arithmetic, tmp_path, SYNCS, kills, **overrides)
        steps = stack.metrics(run)
    _report(capsys, steps, seen, verdict)
    assert len(seen.kills) == len(kills)


async def test_vllm_killed_mid_sync(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real replicas; one is killed while it receives or commits, again and again."""
    description = {
        "name": "killed-syncs",
        "model": str(arithmetic / "model"),
        "generator": {"replicas": 2},
        "restart_budget": 1000,
    }
    kills = {SYNCS_BETWEEN_VLLM_KILLS * (i + 1): MID_SYNC[i % 2] for i in range(VLLM_KILLS)}
    syncs = SYNCS_BETWEEN_VLLM_KILLS * (VLLM_KILLS + 1)
    with running_stack(description, tmp_path) as stack:
        run, seen, verdict = await _run(stack, arithmetic, tmp_path, syncs, kills)
        steps = stack.metrics(run)
    _report(capsys, steps, seen, verdict)
    assert len(seen.kills) == VLLM_KILLS
    assert max(step["canary/max"] for step in steps) < EXACT


async def _run(
    stack: Stack, arithmetic: Path, folder: Path, syncs: int, kills: dict[int, str], **more: Any
) -> tuple[dict[str, Any], Seen, Verdict]:
    """Sync so often with rollouts going on meanwhile; then stop and judge the ledger."""
    run = stack.ok("run", "start", str(_run_file(arithmetic, folder, more)))
    seen = await watch_syncs(stack, syncs, LIMIT_S, kills)
    stack.stop_run(run, 90)
    return run, seen, assert_accounted_for(stack, run["run_id"])


def _run_file(arithmetic: Path, folder: Path, more: dict[str, Any]) -> Path:
    # Decay, so that a batch that teaches nothing makes another version, too.
    optimizer = {"learning_rate": 1.0e-4, "schedule": "constant", "weight_decay": 0.1}
    sections = {"optimizer": optimizer, "checkpoint": {"every_steps": 0}, "export_final": False, **more}
    sizes, rollout = (PROMPTS, SAMPLES, 12), {"max_staleness": 1}
    run = run_on(example_rows(arithmetic), "many-syncs", 20_000, sizes, rollout=rollout, **sections)
    return written(folder, run)


def _report(
    capsys: pytest.CaptureFixture[str], steps: list[dict[str, float]], seen: Seen, verdict: Verdict
) -> None:
    """The figures, past what pytest keeps for failures."""
    seconds = steps[-1]["time"] - steps[0]["time"]
    lines = [f"{seconds:.0f} s, ledger {verdict}"]
    lines += [f"{what}: {figure}" for what, figure in sync_figures(steps, seen).items()]
    with capsys.disabled():
        sys.stdout.write("\n  " + "\n  ".join(lines) + "\n")
