"""Replaces the replicas of a kind one by one with processes of another release, under runs that go on.

Invariants: a replica is drained only when the others of its run, among them a spare of the new release, have caught up
with the weights; so no run has fewer replicas than before, and a release that does not come up has cost nothing. Each
replica keeps its name. What a drained one still has is waited for, at most `grace_s`; what is cut then begins anew
elsewhere. The spares go last. However it ends, every replica of the stack is one of the old release or of the new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition
from flotilla_core.kinds import SCALABLE, SHARED, kind_name
from flotilla_core.roles import holds_judge
from flotilla_launch.launcher import KUBERNETES, Launcher, LocalLauncher

LOOK_EVERY_S = 0.5
_READY = ProcessState.PROCESS_STATE_READY


class Coordinator(Protocol):
    """The coordinator of the stack, as far as an upgrade asks it."""

    async def list_services(self) -> list[pb.Service]: ...

    async def drain_replica(self, replica: str) -> pb.Service: ...


@dataclass(frozen=True)
class Upgrade:
    """One replacement of all replicas of a kind that the launcher of this host runs."""

    launcher: LocalLauncher
    coordinator: Coordinator
    kind: ServiceKind.ValueType
    executables: Path
    """Folder of the new release's commands."""
    ready_timeout_s: float
    grace_s: float
    """The time that a replica has to finish its work."""
    say: Callable[[str], None]

    async def run(self, *, spare: bool) -> list[ProcessStatus]:
        """Replace every replica; return them as they are then."""
        names = await self._replicas()
        spares = [f"{kind_name(self.kind)}-{len(names) + index}" for index in range(await self._runs())]
        spares = spares if spare else []
        try:
            for name in [*spares, *names]:
                await self._replace(name)
        finally:
            if spares:
                self.say(f"removing {', '.join(spares)}")
                await self.launcher.scale(self.kind, len(names), timeout_s=self.ready_timeout_s)
        return [one for one in (await self.launcher.state()).processes if one.name in names]

    async def _replace(self, name: str) -> None:
        """Start the new process of one slot, after the old one, if any, has finished what it had."""
        if any(service.registration.name == name for service in await self._services()):
            await self.coordinator.drain_replica(name)
            self.say(f"{name} gets no more work")
            await self._finished(name)
        self.say(f"starting {name} from {self.executables}")
        process = await self.launcher.restart(name, self.executables, timeout_s=2 * self.ready_timeout_s)
        await self._caught_up(process)
        self.say(f"{name} is replaced")

    async def _replicas(self) -> list[str]:
        """Return the replicas that the launcher has; refuse where one is down, which no spare could replace."""
        state = await self.launcher.state()
        own = [
            one
            for one in state.processes
            if one.kind == self.kind and "@" not in one.name and not holds_judge(one.name)
        ]
        down = [one.name for one in own if one.state != _READY]
        if not own or down:
            raise FailedPrecondition(
                f"{', '.join(down) or f'no {kind_name(self.kind)}'} is up",
                why="replicas are replaced while all of them work",
                next_step="see flotilla ps; flotilla up starts what is down",
            )
        return [one.name for one in own]

    async def _runs(self) -> int:
        """Return for how many runs there must be a spare: each has replicas of its own, unless they serve all runs."""
        if self.kind in SHARED:
            return 1
        return max(1, len({one.run_id for one in await self._services() if one.run_id}))

    async def _services(self) -> list[pb.Service]:
        """Return the replicas of the kind, the newest process of each slot."""
        newest: dict[str, pb.Service] = {}
        for one in await self.coordinator.list_services():
            known = newest.get(one.registration.name)
            if one.registration.kind != self.kind or holds_judge(one.registration.name):
                continue
            if known is None or _started(known) < _started(one):
                newest[one.registration.name] = one
        return list(newest.values())

    async def _finished(self, name: str) -> None:
        """Wait until a drained replica has no work and is in no weight group, or its time is over."""
        deadline = time.monotonic() + self.grace_s
        while True:
            service = next((one for one in await self._services() if one.registration.name == name), None)
            if service is None or not (service.run_id or service.outstanding_tokens):
                return
            if time.monotonic() > deadline:
                self.say(f"{name} still has work after {self.grace_s:g} s, which begins anew elsewhere")
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _caught_up(self, process: ProcessStatus) -> None:
        """Wait until the coordinator gives work to a new process: a generator of a run serves its weights by then."""
        deadline = time.monotonic() + self.ready_timeout_s
        why = "the coordinator does not see it"
        while time.monotonic() < deadline:
            services = await self._services()
            own = [one for one in services if one.registration.instance_id == process.instance_id]
            if own:
                why = _why_not_yet(own[0], services)
                if not why:
                    return
            await asyncio.sleep(LOOK_EVERY_S)
        raise DeadlineExceeded(
            f"{process.name} is ready and gets no work",
            where=f"after {self.ready_timeout_s:g} s",
            why=why,
            next_step="see flotilla replicas list; replicas that were not replaced work as before",
        )


def _why_not_yet(own: pb.Service, services: Sequence[pb.Service]) -> str:
    """Say what a new replica waits for; empty where it gets work like the others."""
    if own.work_state != pb.WORK_STATE_READY:
        return own.work_state_reason or "it is not ready"
    if own.registration.kind in SHARED or own.HasField("live_version"):
        return ""
    if own.run_id:
        return f"run {own.run_id} has not sent it weights yet"
    taken = {one.run_id for one in services if one.run_id}
    return (
        f"run {', '.join(sorted(taken))} has not taken it (rollout.generators caps its share)"
        if taken
        else ""
    )


def _started(service: pb.Service) -> int:
    return service.registration.started_at.ToNanoseconds()


def upgradable(launcher: Launcher, kind: str) -> LocalLauncher:
    """Return the launcher that replaces replicas; say for any other one how its engine does it."""
    if isinstance(launcher, LocalLauncher):
        return launcher
    if launcher.name == KUBERNETES:
        raise FailedPrecondition(
            "Kubernetes itself replaces the pods of a release",
            next_step="flotilla up from the new release: pods that differ are replaced, one by one in each workload",
        )
    raise FailedPrecondition(
        f"replicas on {launcher.name} are not replaced by this command",
        why="their commands belong to the placement",
        next_step=f"by hand, one by one: flotilla scale {kind} N+1, flotilla replicas drain NAME, end its node with "
        f"the commands of {launcher.name}, flotilla up",
    )


def kind_of(name: str) -> ServiceKind.ValueType:
    """Return the kind with replicas that a user names."""
    kinds = {kind_name(one): one for one in SCALABLE}
    if name not in kinds:
        raise FailedPrecondition(
            f"{name!r} cannot be replaced under a run",
            why="a run has one of it, or needs its state",
            next_step=f"use one of: {', '.join(kinds)}; for others let runs end, then flotilla down and flotilla up",
        )
    return kinds[name]
