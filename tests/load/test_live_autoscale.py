"""The number of generators follows what the steps of a run measure, over the real launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.runs import QUICK, example_rows, run_on, written
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(400)

WAIT_S = 120.0
UPDATE_S = 0.7
WAITS = 0.6
LONG, SHORT = 20, 1
"""Tokens of a response: generation takes three times as long as an update, or next to nothing."""


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every sample takes its time, and so does every update."""
    scaling = {
        "mode": "act",
        "max_generators": 2,
        "window_steps": 1,
        "cooldown_steps": 0,
        "trainer_waits_above": WAITS,
    }
    sim = {"seconds_per_token": 3 * UPDATE_S / LONG}
    directory = tmp_path_factory.mktemp("scaled")
    with light_stack(
        arithmetic / "model", directory, trainer_s=UPDATE_S, autoscale=scaling, sim=sim
    ) as running:
        yield running


def test_generators_come_where_the_trainer_waits_and_go_where_they_do(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    def started(name: str, tokens: int) -> dict[str, Any]:
        exactly = {"sampling": {"max_response_tokens": tokens, "min_response_tokens": tokens}}
        run = run_on(example_rows(arithmetic), name, 1000, (2, 2, tokens), rollout=exactly, **QUICK)
        return fleet.ok("run", "start", str(written(tmp_path, run)))

    long = started("long", LONG)
    wait_until("one generator more", lambda: generators(fleet) == ["generator-0", "generator-1"], WAIT_S)
    assert "autoscale: 1 -> 2 generators" in notices(long)
    fleet.stop_run(long, WAIT_S)
    assert max(step["idle/trainer"] for step in fleet.metrics(long)) > WAITS

    short = started("short", SHORT)
    wait_until("one generator fewer", lambda: generators(fleet) == ["generator-0"], WAIT_S)
    assert "autoscale: 2 -> 1 generators" in notices(short)
    fleet.stop_run(short, WAIT_S)
    assert max(step["idle/generators"] for step in fleet.metrics(short)) > 0.5


def generators(fleet: Stack) -> list[str]:
    return [
        p["name"] for p in fleet.ok("ps")["processes"] if p["kind"] == "generator" and p["state"] == "ready"
    ]


def notices(run: dict[str, Any]) -> str:
    return Path(run["directory"], "events.jsonl").read_text()
