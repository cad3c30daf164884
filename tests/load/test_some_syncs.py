"""Some weight syncs of many (`make test-load` makes a thousand), with receivers that die, and a late joiner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_testing.many_syncs import watch_syncs
from flotilla_testing.runs import example_rows, run_on, written
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(600)

SYNCS = 20
KILLS = {4: "broadcast", 8: "commit"}
LIMIT_S = 300.0


async def test_twenty_syncs_with_receivers_that_die_lose_no_sample(arithmetic: Path, tmp_path: Path) -> None:
    sim = {"seconds_per_token": 0.01, "commit_s": 0.05}
    with light_stack(arithmetic / "model", tmp_path, replicas=2, sim=sim) as stack:
        run = stack.ok("run", "start", str(_endless_run(arithmetic, tmp_path)))
        seen = await watch_syncs(stack, SYNCS, LIMIT_S, KILLS)
        stack.stop_run(run, 60)
        assert_accounted_for(stack, run["run_id"])
    assert len(seen.kills) == len(KILLS)


def test_a_late_joiner_serves_while_the_rollouts_of_the_others_still_run(
    arithmetic: Path, tmp_path: Path
) -> None:
    longer_than_any_test = {"time_to_first_token_s": 3600.0}
    with light_stack(arithmetic / "model", tmp_path, replicas=1, sim=longer_than_any_test) as stack:
        run = stack.ok("run", "start", str(_endless_run(arithmetic, tmp_path)))
        wait_until("the first replica to serve", lambda: _serving(stack) == {"generator-0"}, LIMIT_S, 0.5)
        stack.ok("scale", "generator", "2")
        wait_until("the joiner to serve", lambda: "generator-1" in _serving(stack), LIMIT_S, 0.5)
        first, joiner = _held(stack)
        assert (joiner["policy_version"], joiner["digest"]) == (first["policy_version"], first["digest"])
        assert not stack.metrics(run), "no step has ended"


def _held(stack: Stack) -> list[dict[str, Any]]:
    held: list[dict[str, Any]] = stack.ok("weights", "show")["generators"]
    return held


def _serving(stack: Stack) -> set[str]:
    return {one["name"] for one in _held(stack)}


def _endless_run(arithmetic: Path, folder: Path) -> Path:
    weights = {"canary": {"prompts": 0}, "timeout_s": 20}
    sections = {"rollout": {"max_staleness": 1}, "weights": weights, "export_final": False}
    return written(folder, run_on(example_rows(arithmetic), "syncs", 100_000, (8, 4, 12), **sections))
