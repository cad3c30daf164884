"""Signals to a coordinator at a named phase of its run, and a run that meets every phase.

Invariants: the phase is seen from outside, by the call that watchers have, so the product holds no hook for tests;
every wait is bounded.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import psutil

from flotilla.coordinator.v1 import coordinator_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla_core.rpc import unary
from flotilla_testing.runs import QUICK, example_rows, run_on, written
from flotilla_testing.stack import Stack

LOOK_EVERY_S = 0.005
LIMIT_S = 120.0


async def signal_inside(stack: Stack, run_id: str, phase: str, number: signal.Signals) -> None:
    """Send a signal to the coordinator the moment its run is seen in `phase`."""
    process = stack.process("coordinator")
    request = coordinator_pb2.GetRunRequest(run_id=run_id)
    async with asyncio.timeout(LIMIT_S), stack.channel("coordinator") as channel:
        stub = CoordinatorServiceStub(channel)
        while (await unary(stub.GetRun, request, timeout_s=10)).run.phase != phase:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(LOOK_EVERY_S)
    process.send_signal(number)


def is_new(stack: Stack, pid: int) -> bool:
    """Return whether another coordinator than that of `pid` has announced itself."""
    try:
        return stack.process("coordinator").pid != pid
    except (FileNotFoundError, json.JSONDecodeError, psutil.NoSuchProcess):
        return False


def endless_run(arithmetic: Path, folder: Path, max_staleness: int) -> Path:
    """Return the file of a run that evaluates and saves after every step."""
    held_out = str(arithmetic / "data" / "heldout.jsonl")
    run = run_on(
        example_rows(arithmetic),
        "restarted",
        100_000,
        rollout={"max_staleness": max_staleness},
        evaluation={"data": held_out, "max_prompts": 4, "every_steps": 1},
        checkpoint={"every_steps": 1},
        **QUICK,
    )
    return written(folder, run)
