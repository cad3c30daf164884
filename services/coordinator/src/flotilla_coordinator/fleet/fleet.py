"""Leases services to runs, decides which replicas get work, and updates every run's view from one registry watch.

Invariants: a gang and a generator belong to one run at a time, by the names of their slots. A run releases a service
before the next run gets it, and sees only its own services. A coordinator that no longer sees its fleet is not
healthy: it ends, and is started again. A run that is alone is always admitted, and waits for what it needs; the
refusal of another run names the runs that hold each service.

A replica that speaks another protocol is ejected, and one that a user drained is draining, whatever else is known of
it. Any other replica has the state in which a run gives it no work, if there is such a run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_coordinator.fleet.leases import (
    GANGS,
    GENERATORS,
    Claim,
    GangLeases,
    GeneratorLeases,
    GeneratorSlots,
    LeaseFile,
)
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_core.config import RunConfig
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.judge_generators import judge_roles
from flotilla_core.kinds import SCALABLE, SHARED, kind_name
from flotilla_core.protocol import limits, refusal
from flotilla_core.roles import POLICY, holds_judge, name_of_role, process_name, section_of
from flotilla_core.rpc import Fence, Replica
from flotilla_core.rpc.dial_back import DialBack
from flotilla_core.rpc.replica_set import ReplicaState
from flotilla_core.service import Host
from flotilla_core.tasks import both

LOOK_EVERY_S = 0.1

DRAINED = "drained by a user"

_WORKING = (reg.INSTANCE_STATE_READY, reg.INSTANCE_STATE_DRAINING)


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that a run asks of the fleet: a gang of each role, and generators where it draws samples."""

    roles: tuple[str, ...] = (POLICY,)
    generates: bool = True
    most_generators: int | None = None
    """The most generators that the run takes; None takes an even share of all."""
    judges: tuple[str, ...] = ()
    """The judges that the run asks, wherever they are."""

    @classmethod
    def of(cls, config: RunConfig) -> ResourceRequest:
        """Derive the request from the configuration of the run."""
        return cls(
            roles=(POLICY, *config.gangs_beside_the_policy),
            generates=config.needs_generators,
            most_generators=config.rollout.generators,
            judges=tuple(dict.fromkeys(term.judge for term in config.all_rewards if term.judge)),
        )


def require_gang(
    role: str,
    slots: Collection[str],
    holders: Mapping[str, str],
    claimants: Collection[str],
    refused: Sequence[str] = (),
) -> None:
    """Refuse a run where no gang of the role is left for it.

    `holders` gives the run of a slot; claimants without a slot will take one. `refused` says why other gangs do not
    count.
    """
    if len({*slots, *holders}) > len(claimants):
        return
    name = process_name(role)
    by_run = {run_id: slot for slot, run_id in holders.items()}
    users = [f"run {run_id} is using {_called(by_run.get(run_id, name), name)}" for run_id in claimants]
    raise FailedPrecondition(
        ", ".join(users),
        why=", ".join([f"each run needs a {name} of its own, and there is no other one", *refused]),
        next_step=f"{_wait_or_stop(claimants)}, or start the stack with more (`{section_of(role)}.replicas` in "
        "stack.yaml)",
    )


def require_generator(
    slots: Collection[str], claimants: Collection[str], refused: Sequence[str] = ()
) -> None:
    """Refuse a run where no generator is left for it; `refused` says why other generators do not count."""
    if len(slots) > len(claimants):
        return
    runs = ", ".join(claimants)
    raise FailedPrecondition(
        f"there is no generator for another run: {len(slots)} for run {runs}",
        why=", ".join(["each run that samples needs at least one", *refused]),
        next_step=f"start another one (`flotilla scale generator {len(claimants) + 1}`); "
        f"or {_wait_or_stop(claimants)}",
    )


def _called(slot: str, name: str) -> str:
    return f"the {name}" if slot == name else slot


def _wait_or_stop(claimants: Collection[str]) -> str:
    first = next(iter(claimants))
    return f"wait for one (`flotilla run watch {first}`), stop one (`flotilla run stop {first}`)"


class Fleet:
    """Leases services to runs."""

    def __init__(self, host: Host, owns_state: Callable[[], bool]) -> None:
        """Take `owns_state`, which is false once another coordinator has taken over."""
        self._host = host
        self.runs: dict[str, RunFleet] = {}
        self._slots = GeneratorSlots(host.stack.ready_timeout_s)
        self.generators = GeneratorLeases()
        self._gangs = GangLeases()
        self._file = LeaseFile(host.state_dir / "leases.json", owns_state)
        self._drained: set[str] = set()
        """Instances that a user took out of service."""
        self.registrations: dict[str, reg.Registration] = {}
        self._unreached: dict[str, str] = {}

    async def see(
        self, snapshot: Mapping[str, reg.Registration], unreached: Mapping[str, str] | None = None
    ) -> None:
        """Take in the services that exist now, and why some are not ready though they say so, by instance."""
        self.registrations = dict(snapshot)
        self._unreached = dict(unreached or {})
        await self.settle()

    @property
    def changes_with_time(self) -> bool:
        """Return whether something may change without a report from a service."""
        return bool(self.generators.leaving) or self._slots.any_away

    async def close(self) -> None:
        """Close every run's view."""
        for run in [*self.runs.values()]:
            await run.close()

    def require_place(self, wanted: ResourceRequest) -> None:
        """Refuse one more run that would find no gang or no generator; a run that is alone waits for them."""
        if not self.runs:
            return
        for role in wanted.roles:
            held = self._gangs.of_role(role)
            refused = self._refusals(reg.SERVICE_KIND_TRAINER, role)
            require_gang(role, self._gang_slots(role), held, self._gangs.claimants(role), refused)
        if wanted.generates:
            refused = self._refusals(reg.SERVICE_KIND_GENERATOR, POLICY)
            require_generator(self._available_slots(), self.generators.claimants, refused)

    async def admit(self, run_id: str, wanted: ResourceRequest) -> RunFleet:
        """Return the run's own view; it gets generators at once, and gangs when it asks for them."""
        run = self._claim(run_id, wanted, gangs=(), generators=())
        await self.settle()
        return run

    async def admit_again(self, runs: Sequence[tuple[str, ResourceRequest]]) -> list[RunFleet]:
        """Admit the runs that an earlier coordinator left, each with what it had, before any of them looks for more."""
        admitted = [
            self._claim(
                run_id,
                wanted,
                gangs=self._file.had(GANGS, run_id),
                generators=self._file.had(GENERATORS, run_id),
            )
            for run_id, wanted in runs
        ]
        await self.settle()
        return admitted

    async def end(self, run_id: str) -> None:
        """Release everything that a run has, and forget it."""
        self.runs.pop(run_id, None)
        self._gangs.end(run_id)
        self.generators.end(run_id)
        await self.settle()

    async def take_gang(self, run_id: str, role: str, slot: str) -> bool:
        """Lease a gang to a run; return False where another run was faster."""
        taken = self._gangs.take(run_id, role, slot)
        await self.settle()
        return taken

    async def give_gang_back(self, run_id: str, role: str) -> None:
        """Release the run's gang of a role, so that it can look for another one, or for the same one again."""
        self._gangs.give_back(run_id, role)
        await self.settle()

    def others(self, run_id: str) -> int:
        """Return the number of other runs."""
        return len(self.runs.keys() - {run_id})

    def holder(self, registration: reg.Registration) -> str:
        """Return the run that has this gang or generator; empty where none has."""
        if registration.kind == reg.SERVICE_KIND_GENERATOR:
            return self.generators.held.get(registration.name, "")
        return self._gangs.held.get(registration.name, "")

    def describe(self, registration: reg.Registration) -> ReplicaStatus | None:
        """Return how the runs see a generator or a reward replica; None for others and before it has started.

        A service of any kind whose address does not answer has a status as well: it says why.
        """
        if why := self._unreached.get(registration.instance_id):
            return ReplicaStatus("ejected", why)
        if not is_working_replica(registration):
            return None
        seen = [
            replica
            for run in self.runs.values()
            if (replica := run.replica(registration.instance_id)) is not None
        ]
        return describe(registration, seen, drained=registration.instance_id in self._drained)

    async def drain(self, reference: str) -> reg.Registration:
        """Give no more work to the replica with this instance id or slot; the last one of a run cannot be drained."""
        found = working_replica(self.registrations.values(), reference)
        kind = kind_name(found.kind)
        needed_by = [run_id for run_id, run in self.runs.items() if run.is_last(found.instance_id)]
        if needed_by:
            raise FailedPrecondition(
                f"{found.name} is the only {kind} of run {', '.join(needed_by)} that may get work",
                why="the run would wait for another one, and fail after ready_timeout_s",
                next_step=f"start another one first (`flotilla scale {kind} 2`), or stop the run",
            )
        # Earlier instances of its slot are dead, but stay in the registry for a while.
        self._drained.update(
            one.instance_id
            for one in self.registrations.values()
            if one.name == found.name and one.started_at.ToNanoseconds() <= found.started_at.ToNanoseconds()
        )
        await self.settle()
        return found

    async def settle(self) -> None:
        """Assign generators, take back those that are released, and show every run its services as they are now."""
        self._deal()
        while left := [slot for slot in self.generators.leaving if self._holding(slot).has_left(slot)]:
            for slot in left:
                self._holding(slot).forget(slot)
                self.generators.let_go(slot)
            self._deal()
        for run_id, run in [*self.runs.items()]:
            await run.update(self.registrations, self._why_not(run_id))
        self._file.write({GENERATORS: self.generators.held, GANGS: self._gangs.held})

    def _claim(
        self, run_id: str, wanted: ResourceRequest, *, gangs: Sequence[str], generators: Sequence[str]
    ) -> RunFleet:
        self._gangs.claim(run_id, wanted.roles, gangs)
        if wanted.generates:
            self.generators.claim(Claim(run_id, wanted.most_generators), generators)
        held = {*map(name_of_role, judge_roles(self._host.stack))}
        judges = [name for name in wanted.judges if name in held]
        run = self.runs[run_id] = RunFleet(run_id, self._connect, self, wanted.roles, judges)
        return run

    def _deal(self) -> None:
        for slot in self.generators.deal(self._available_slots()):
            self._holding(slot).leave(slot, self._why_it_leaves(slot))

    def _holding(self, slot: str) -> RunFleet:
        return self.runs[self.generators.held[slot]]

    def _why_not(self, run_id: str) -> Callable[[reg.Registration], str]:
        """Return a function that says why a run cannot have a service; its answer is empty where the run can."""
        gangs = {
            slot
            for role in self._gangs.roles(run_id)
            for slot in self._gangs.open_to(run_id, role, self._gang_slots(role))
        }

        def why_not(one: reg.Registration) -> str:
            if one.kind in SHARED or holds_judge(one.name):
                return DRAINED if one.instance_id in self._drained else ""
            if refusal(one):  # No run can have it: each run names it where it finds no other one.
                return ""
            held = self.generators.held if one.kind == reg.SERVICE_KIND_GENERATOR else self._gangs.held
            if held.get(one.name) == run_id or one.name in gangs:
                return ""
            return f"it is for run {held[one.name]}" if one.name in held else "it is for another run"

        return why_not

    def _why_it_leaves(self, slot: str) -> str:
        theirs = [one for one in self.registrations.values() if one.name == slot]
        if any(one.instance_id in self._drained for one in theirs):
            return DRAINED
        is_going = all(one.state == reg.INSTANCE_STATE_DRAINING for one in theirs)
        return "draining" if is_going else "another run is to have it"

    def _available_slots(self) -> set[str]:
        return self._slots.available(self.registrations, self.generators.held, self._drained)

    def _gang_slots(self, role: str) -> set[str]:
        return {
            one.name
            for one in self.registrations.values()
            if one.kind == reg.SERVICE_KIND_TRAINER
            and one.state == reg.INSTANCE_STATE_READY
            and (one.role or POLICY) == role
            and not refusal(one)
        }

    def _refusals(self, kind: reg.ServiceKind.ValueType, role: str) -> list[str]:
        """Say which services no run can have, and why."""
        ours = [one for one in self.registrations.values() if one.kind == kind]
        return [why for one in ours if role == (one.role or POLICY) and (why := refusal(one))]

    def _connect(self, address: str, fence: Callable[[], Fence | None]) -> grpc.aio.Channel:
        return self._host.connect(address, fence=fence)


async def keep_in_view(fleet: Fleet, host: Host) -> None:
    """Show the fleet which services exist, for as long as the coordinator works."""
    try:
        await both(_follow(fleet, host), _look_again(fleet))
    # Whatever the error is, the fleet is out of view now.
    except Exception as error:  # noqa: BLE001
        host.failed(error)


async def _follow(fleet: Fleet, host: Host) -> None:
    dial_back = DialBack(host.connect)
    async with contextlib.aclosing(dial_back.follow(host.registry.watch())) as admitted:
        async for snapshot, unreached in admitted:
            await fleet.see(snapshot, unreached)


async def _look_again(fleet: Fleet) -> None:
    """Check regularly for changes that no service reports: a group has ended, or a process is away for too long."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if fleet.changes_with_time:
            await fleet.settle()


@dataclass(frozen=True)
class ReplicaStatus:
    """Whether a replica gets work, and how much it has."""

    state: ReplicaState
    why: str = ""
    outstanding: int = 0


def is_working_replica(registration: reg.Registration) -> bool:
    """Return whether this is a generator of the policy or a reward replica that has started."""
    scales = registration.kind in SCALABLE and not holds_judge(registration.name)
    return scales and registration.state in _WORKING


def describe(registration: reg.Registration, seen: Sequence[Replica[Any]], *, drained: bool) -> ReplicaStatus:
    """Combine the views that runs have of a replica into one status; `drained` means by a user."""
    if why := refusal(registration):
        return ReplicaStatus("ejected", why)
    outstanding = sum(replica.outstanding for replica in seen)
    if drained:
        return ReplicaStatus("draining", DRAINED, outstanding)
    if registration.state == reg.INSTANCE_STATE_DRAINING:
        return ReplicaStatus("draining", "draining", outstanding)
    worst = next((replica for replica in seen if replica.state != "ready"), None)
    why = limits(registration) if worst is None else worst.why
    return ReplicaStatus("ready" if worst is None else worst.state, why, outstanding)


def working_replica(registrations: Iterable[reg.Registration], reference: str) -> reg.Registration:
    """Find a replica by its instance id, or the newest in the slot of this name: older ones there are dead."""
    working = [
        one for one in registrations if is_working_replica(one) and reference in (one.instance_id, one.name)
    ]
    if working:
        return max(working, key=lambda one: one.started_at.ToNanoseconds())
    raise NotFound(f"there is no replica {reference!r}", next_step="see `flotilla replicas list`")
