"""A run that syncs many times, watched from outside, whose receivers die on the way.

Invariants: what is seen comes from the calls that operators have; a version has one digest, on whichever replica and
however often it is looked at, and a digest belongs to one version; every wait is bounded and named.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla_core.errors import Unavailable
from flotilla_core.rpc import unary
from flotilla_core.version import Version
from flotilla_testing.replica_faults import kill_inside
from flotilla_testing.stack import Stack

LOOK_EVERY_S = 0.02
MID_SYNC = ("broadcast", "commit")


@dataclass
class Seen:
    """Versions and digests that were seen on replicas, and the kills."""

    digests: dict[Version, str] = field(default_factory=dict)
    looks: int = 0
    kills: list[str] = field(default_factory=list)

    def look(self, held: list[pb.HeldWeights]) -> None:
        """Compare what replicas hold now with all that was seen before."""
        self.looks += 1
        for one in held:
            version = Version.from_proto(one.version)
            known = self.digests.setdefault(version, one.digest)
            assert known == one.digest, f"{one.name} holds {one.digest} as {version}, others held {known}"
        assert len(set(self.digests.values())) == len(self.digests), "two versions have one digest"


def one_in_ten(syncs: int, seed: int) -> dict[int, str]:
    """For each ten syncs one that loses a receiver, and the phase in which it dies."""
    draw = random.Random(seed)
    return {ten + draw.randrange(2, 10): draw.choice(MID_SYNC) for ten in range(0, syncs - 9, 10)}


async def watch_syncs(
    stack: Stack, syncs: int, limit_s: float, kills: Mapping[int, str] | None = None
) -> Seen:
    """Follow the run until its policy is `syncs` versions old and every kill was done.

    A receiver dies in each of the syncs named, or in the first one after it that has another receiver left.
    """
    due, draw, seen = dict(kills or {}), random.Random(syncs), Seen()
    async with asyncio.timeout(limit_s), stack.channel("coordinator") as channel:
        stub = CoordinatorServiceStub(channel)
        while True:
            shown = await unary(stub.ShowWeights, pb.ShowWeightsRequest(), timeout_s=10)
            seen.look(list(shown.generators))
            step = shown.policy_version.step
            if step >= syncs and not due:
                return seen
            overdue = [sync for sync in sorted(due) if sync <= step + 1]
            if overdue and len(shown.generators) > 1:
                victim, phase = draw.choice([one.name for one in shown.generators]), due[overdue[0]]
                # One that died just now is still shown: then another one is killed.
                with contextlib.suppress(Unavailable, OSError, psutil.NoSuchProcess):
                    await kill_inside(stack, victim, phase)
                    seen.kills.append(f"{victim} in {phase}")
                    del due[overdue[0]]
            await asyncio.sleep(LOOK_EVERY_S)


def sync_figures(steps: list[dict[str, float]], seen: Seen) -> dict[str, Any]:
    """Format the cost of a run's syncs for printing."""
    stalls = sorted(step["sync/stall_s"] for step in steps)
    return {
        "syncs": len(steps),
        "epochs beyond one a sync": int(sum(step["sync/epochs"] - 1 for step in steps)),
        "versions seen on replicas": len(seen.digests),
        "looks": seen.looks,
        "kills": len(seen.kills),
        "replicas that caught up": int(sum(step.get("sync/caught_up", 0.0) for step in steps)),
        "median sync": f"{1000 * statistics.median(step['time/sync_s'] for step in steps):.0f} ms",
        "longest sync": f"{max(step['time/sync_s'] for step in steps):.2f} s",
        "median stall": f"{1000 * statistics.median(stalls):.0f} ms",
        "p99 stall": f"{1000 * stalls[int(0.99 * (len(stalls) - 1))]:.0f} ms",
    }
