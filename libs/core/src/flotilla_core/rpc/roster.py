"""Which replicas of one kind, or of one role within it, there are, and how each of them stands.

Invariants: a replica is ready when it is READY in the registry and has not failed since its last SERVING; an ejected
one comes back through its health alone; one that the registry lost is asked itself: it stays while it serves, and when
it does not answer the calls that wait for it fail at once; else a channel stays open until the last lease on it is
given back; one whose build cannot talk to ours is never a replica, and is named where they are told of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import grpc
import structlog

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.protocol import refusal
from flotilla_core.roles import POLICY, process_name
from flotilla_core.rpc.replica import Replica
from flotilla_core.rpc.replica_health import until_serving, while_serving

StubT = TypeVar("StubT")

_STABLE_AFTER_S = 30.0

logger = structlog.get_logger()


class Roster(Generic[StubT]):
    """The replicas of one pool; `changed` is called when one comes back or goes by itself."""

    def __init__(
        self,
        kind: reg.ServiceKind.ValueType,
        role: str,
        stub: Callable[[grpc.aio.Channel], StubT],
        connect: Callable[[str], grpc.aio.Channel],
        changed: Callable[[], None],
    ) -> None:
        self._kind = kind
        self._role = role
        self._stub = stub
        self._connect = connect
        self._changed = changed
        self._replicas: dict[str, Replica[StubT]] = {}
        self._refused: dict[str, str] = {}
        """Why, by instance."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._missing: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, snapshot: dict[str, reg.Registration]) -> None:
        """Take in who exists now."""
        ours = {key: one for key, one in snapshot.items() if self._is_ours(one)}
        self._refuse({key: why for key, one in ours.items() if (why := refusal(one))})
        ours = {key: one for key, one in ours.items() if key not in self._refused}
        for replica in [one for key, one in self._replicas.items() if key not in ours]:
            self._miss(replica, ours)
        for instance_id, registration in ours.items():
            known = self._replicas.get(instance_id)
            if known is not None and known.address != registration.address:
                self._retire(self._replicas.pop(instance_id), "its address changed")
                known = None
            if known is not None:
                self._stop(self._missing, known)
                known.registration = registration
            elif registration.state == reg.INSTANCE_STATE_READY and not _superseded(registration, ours):
                channel = self._connect(registration.address)
                known = self._replicas[instance_id] = Replica(registration, channel, self._stub(channel))
            if known is not None:
                self._follow_registration(known, _superseded(registration, ours))

    def everyone(self) -> list[Replica[StubT]]:
        """All that are known, whatever their state."""
        return list(self._replicas.values())

    def ready(self) -> Iterator[Replica[StubT]]:
        """Those that may get work now."""
        return (replica for replica in self._replicas.values() if replica.state == "ready")

    def eject(self, instance_id: str, why: str, *, replaceable: bool = True) -> None:
        """Not ready until its health says SERVING again; who stays out longer each time needs others to fill in."""
        replica = self._replicas.get(instance_id)
        if replica is None or replica.state != "ready":
            return
        now = asyncio.get_running_loop().time()
        again = replaceable and now - replica.returned_at < _STABLE_AFTER_S
        replica.ejections = replica.ejections + 1 if again else 1
        replica.state, replica.why = "ejected", why
        logger.warning("replica ejected", replica=replica.name, instance_id=instance_id, why=why)
        self._probes[instance_id] = asyncio.create_task(self._probe(replica), name=f"probe {replica.name}")

    def drain(self, instance_id: str, why: str) -> None:
        """Not ready for as long as its process lives."""
        replica = self._replicas.get(instance_id)
        if replica is not None and replica.state != "draining":
            self._stop(self._probes, replica)
            replica.state, replica.why = "draining", why
            logger.info("replica drained", replica=replica.name, instance_id=instance_id, why=why)

    def dismiss(self, instance_id: str, why: str) -> None:
        """Not one of these any more."""
        replica = self._replicas.pop(instance_id, None)
        if replica is not None:
            self._retire(replica, why)

    def given_back(self, replica: Replica[StubT]) -> None:
        """A lease on it has ended; the last one of a replica that is gone closes its channel."""
        if replica.leases == 0 and self._replicas.get(replica.instance_id) is not replica:
            self._close(replica)

    async def close(self) -> None:
        """Close every channel; calls that still run are cancelled."""
        replicas, self._replicas = self._replicas, {}
        tasks = [*self._probes.values(), *self._missing.values()]
        self._probes.clear()
        self._missing.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        await asyncio.gather(*(replica.channel.close() for replica in replicas.values()))

    def standing(self) -> str:
        """How they stand, in words."""
        known = [
            f"{one.name} is {one.state}" + (f" ({one.why})" if one.why else "")
            for one in self._replicas.values()
        ]
        refused = [f"refused: {why}" for why in self._refused.values()]
        return ", ".join(known + refused) or f"no {self._kind_name()} is there that may get work"

    def _is_ours(self, registration: reg.Registration) -> bool:
        return registration.kind == self._kind and (
            not self._role or self._role == (registration.role or POLICY)
        )

    def _refuse(self, refused: dict[str, str]) -> None:
        """These, whose builds cannot talk to ours; each is logged once."""
        for instance_id in refused.keys() - self._refused.keys():
            logger.error("replica refused", instance_id=instance_id, why=refused[instance_id])
        self._refused = refused

    def _follow_registration(self, replica: Replica[StubT], superseded: bool) -> None:
        if superseded:
            self._retire(self._replicas.pop(replica.instance_id), "its slot was started again")
        elif replica.registration.state != reg.INSTANCE_STATE_READY and replica.state != "draining":
            self._stop(self._probes, replica)
            replica.state = "draining"
            state = reg.InstanceState.Name(replica.registration.state)
            replica.why = state.removeprefix("INSTANCE_STATE_").lower()

    def _retire(self, replica: Replica[StubT], why: str, *, calls_end: bool = False) -> None:
        self._stop(self._probes, replica)
        self._stop(self._missing, replica)
        replica.state, replica.why = "draining", why
        logger.info("replica gone", replica=replica.name, instance_id=replica.instance_id, why=why)
        if calls_end or replica.leases == 0:
            self._close(replica)

    def _miss(self, replica: Replica[StubT], ours: dict[str, reg.Registration]) -> None:
        """The registry has it no more: it went, it hangs, or its heartbeats alone were lost."""
        if _superseded(replica.registration, ours):
            self._retire(self._replicas.pop(replica.instance_id), "its slot was started again")
        elif replica.state == "draining":
            self._retire(self._replicas.pop(replica.instance_id), "it left the registry")
        elif replica.instance_id not in self._missing:
            asking = asyncio.create_task(self._ask_missing(replica), name=f"missing {replica.name}")
            self._missing[replica.instance_id] = asking

    async def _ask_missing(self, replica: Replica[StubT]) -> None:
        answers = await while_serving(replica)
        self._missing.pop(replica.instance_id, None)
        if self._replicas.get(replica.instance_id) is replica:
            del self._replicas[replica.instance_id]
            why = "it left the registry" + ("" if answers else " and does not answer")
            self._retire(replica, why, calls_end=not answers)
            self._changed()

    async def _probe(self, replica: Replica[StubT]) -> None:
        await until_serving(replica)
        self._probes.pop(replica.instance_id, None)
        replica.state, replica.why = "ready", ""
        replica.returned_at = asyncio.get_running_loop().time()
        logger.info("replica is back", replica=replica.name, instance_id=replica.instance_id)
        self._changed()

    def _close(self, replica: Replica[StubT]) -> None:
        task = asyncio.create_task(replica.channel.close(), name=f"close {replica.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @staticmethod
    def _stop(tasks: dict[str, asyncio.Task[None]], replica: Replica[StubT]) -> None:
        """End what looks after this replica, if anything does."""
        task = tasks.pop(replica.instance_id, None)
        if task is not None:
            task.cancel()

    def _kind_name(self) -> str:
        """What to call one in messages."""
        kind = reg.ServiceKind.Name(self._kind).removeprefix("SERVICE_KIND_").lower()
        return process_name(self._role) if self._role else kind


def _superseded(registration: reg.Registration, ours: dict[str, reg.Registration]) -> bool:
    """Whether a later process fills the same slot: then this one is dead, registered or not."""
    return any(
        other.name == registration.name
        and other.instance_id != registration.instance_id
        and other.started_at.ToNanoseconds() > registration.started_at.ToNanoseconds()
        for other in ours.values()
    )
