"""Generators come and go while a run samples: nothing is lost, and throughput follows their number."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla_coordinator.ledger.records import DropReason
from flotilla_core.rpc import unary
from flotilla_testing.runs import example_rows, run_on, written
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(1800)

ROUNDS = 3
SIZES = (1, 4, 2)
FOLLOWS_WITHIN_S = 10.0
PLACES = 8
"""Samples that one generator decodes at a time."""
SAMPLE_S = 1.0
PROMPTS, SAMPLES, MAX_STALENESS = 4, 4, 3
"""Sixty-four samples are admitted at a time: work for four generators, and a queue in front of one or two."""
SHARE = 0.75
"""Of what so many can decode, at least; those that leave still end what they have, so it may be more."""
WINDOW_S = 8.0
LOOK_EVERY_S = 0.1
LIMIT_S = 180.0


@dataclass(frozen=True)
class Change:
    """What one change of the number of generators brought."""

    generators: int
    ready_s: float
    """From the command until the fleet said so."""
    follows_s: float
    """From then until the throughput was that of their number."""
    rate: float
    """Samples a second afterwards."""

    def __str__(self) -> str:
        return (
            f"{self.generators} generators: ready after {self.ready_s:.1f} s, throughput followed after "
            f"{self.follows_s:.1f} s: {self.rate:.1f} of {capacity(self.generators):.0f} samples/s"
        )


async def test_throughput_follows_the_number_of_generators_and_no_sample_is_lost(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sim = {"time_to_first_token_s": SAMPLE_S}
    with light_stack(
        arithmetic / "model", tmp_path, replicas=1, sim=sim, max_running_samples=PLACES
    ) as stack:
        run = stack.ok("run", "start", str(_run_file(arithmetic, tmp_path)))
        wait_until("the first step", lambda: bool(stack.metrics(run)), LIMIT_S)
        changes = [await _change(stack, run, size) for _ in range(ROUNDS) for size in SIZES]
        stack.stop_run(run, LIMIT_S)
        verdict = assert_accounted_for(stack, run["run_id"])
    with capsys.disabled():
        sys.stdout.write("\n  " + "\n  ".join(map(str, [*changes, verdict])) + "\n")
    assert set(verdict.dropped) <= {DropReason.RUN_ENDED}, "nothing else was lost"
    assert max(change.follows_s for change in changes) <= FOLLOWS_WITHIN_S


def capacity(generators: int) -> float:
    """Samples a second that so many can decode."""
    return generators * PLACES / SAMPLE_S


async def _change(stack: Stack, run: dict[str, Any], size: int) -> Change:
    began = time.time()
    scaling = asyncio.create_task(asyncio.to_thread(stack.ok, "scale", "generator", str(size)))
    async with asyncio.timeout(LIMIT_S), stack.channel("coordinator") as channel:
        stub = CoordinatorServiceStub(channel)
        while await _ready(stub) != size:
            await asyncio.sleep(LOOK_EVERY_S)
        ready = time.time()
        await scaling
        judged = ready + FOLLOWS_WITHIN_S + WINDOW_S
        while stack.metrics(run)[-1]["time"] < judged:
            await asyncio.sleep(LOOK_EVERY_S)
    ends = [step["time"] for step in stack.metrics(run)]
    followed = next(
        (since for since in ends if since >= ready and _rate(ends, since) >= SHARE * capacity(size)),
        float("inf"),
    )
    return Change(size, ready - began, followed - ready, _rate(ends, ready + FOLLOWS_WITHIN_S))


async def _ready(stub: CoordinatorServiceStub) -> int:
    listed = await unary(stub.ListServices, pb.ListServicesRequest(), timeout_s=10)
    return sum(
        one.registration.kind == SERVICE_KIND_GENERATOR and one.work_state == pb.WORK_STATE_READY
        for one in listed.services
    )


def _rate(ends: list[float], since: float) -> float:
    """Samples a second in the window that begins then."""
    inside = [end for end in ends if since <= end <= since + WINDOW_S]
    if len(inside) < 2:
        return 0.0
    return (len(inside) - 1) * PROMPTS * SAMPLES / (inside[-1] - inside[0])


def _run_file(arithmetic: Path, folder: Path) -> Path:
    run = run_on(
        example_rows(arithmetic),
        "scaling",
        20_000,
        (PROMPTS, SAMPLES, 12),
        rollout={"max_staleness": MAX_STALENESS},
        weights={"canary": {"prompts": 0}, "timeout_s": 20},
        checkpoint={"every_steps": 0},
        export_final=False,
    )
    return written(folder, run)
