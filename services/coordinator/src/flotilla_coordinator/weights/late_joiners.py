"""Replicas that come between two syncs take the version that is served in a small group of their own.

Invariants: the group is the trainer and those that came, under the next epoch; only the work that is being waited for
goes on beside it, and when that ends the group is ended too, at the trainer first, so no step waits for a joiner; a
joiner serves only after its commit and its live check; each instance is tried once a version, and its trouble costs
its own eviction, never the run. Whoever was not taken in is a member of the next sync.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from flotilla_coordinator.weights.blame import GroupBrokenError
from flotilla_coordinator.weights.members import GeneratorReplica, Member
from flotilla_coordinator.weights.serving import Serving
from flotilla_coordinator.weights.sync_report import SyncReport
from flotilla_coordinator.weights.weight_epochs import WeightEpochs
from flotilla_core import telemetry
from flotilla_core.errors import FlotillaError
from flotilla_core.telemetry import names
from flotilla_core.version import Version


class LateJoiners:
    """Brings the version that is served to replicas that do not have it yet."""

    def __init__(
        self,
        run_id: str,
        epochs: WeightEpochs,
        serving: Serving,
        expel: Callable[[Member, FlotillaError], None],
        verify: Callable[[SyncReport], Awaitable[dict[str, FlotillaError]]],
    ) -> None:
        self._run_id = run_id
        self._epochs = epochs
        self._serving = serving
        self._expel = expel
        self._verify = verify
        self._tried: set[tuple[str, Version]] = set()

    def among(self, replicas: list[GeneratorReplica], version: Version) -> list[GeneratorReplica]:
        """Those that do not serve `version` and have not been tried with it."""
        return [
            replica
            for replica in replicas
            if not self._serving.serves(replica.instance_id, version)
            and (replica.instance_id, version) not in self._tried
        ]

    async def catch_up(self, replicas: list[GeneratorReplica], version: Version) -> None:
        """Take these in, if they can be; cancelling it frees the trainer before it returns."""
        self._tried = {(who, tried) for who, tried in self._tried if tried == version}
        self._tried |= {(replica.instance_id, version) for replica in replicas}
        attributes = {names.RUN_ID: self._run_id, names.POLICY_VERSION: str(version)}
        with telemetry.span(names.RL_CATCH_UP, attributes=attributes) as span:
            try:
                await self._catch_up(replicas, version)
            except GroupBrokenError as broken:
                span.add_event("weight group broken", {"failures": str(broken)})
                for member, why in await self._epochs.abandon(broken):
                    self._expel(member, why)
            finally:
                try:
                    await self._epochs.close_newest()
                # The next group that opens closes this one: no reason to end the run.
                except FlotillaError as error:
                    span.add_event("weight group not closed", {"why": str(error)})

    async def _catch_up(self, replicas: list[GeneratorReplica], version: Version) -> None:
        group = await self._epochs.form(replicas)
        started = time.monotonic()
        staged = await self._epochs.stage(group, version)
        stage_s = time.monotonic() - started
        taken, failures = await self._epochs.commit(group, staged)
        members = tuple(held.member for held in taken)
        stall_s = max(held.stall_s for held in taken)
        report = SyncReport(version, staged.published.bytes, stage_s, stall_s, members, 1, caught_up=True)
        failures |= await self._verify(report)
        for held in taken:
            if held.member.name not in failures:
                self._serving.took(held)
        for member in group.members:
            if member.name in failures:
                self._expel(member, failures[member.name])
