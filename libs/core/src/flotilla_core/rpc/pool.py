"""The replicas of one kind, or of one role within it: who may get work, and who gets the next.

Invariants: only a replica that is READY in the registry and that has not failed since its last SERVING gets
work; a caller whose call failed ejects the replica at once, long before the registry notices; an ejected one
comes back through its health alone; one that the registry lost is asked itself: it stays while it serves, and when it
does not answer the calls that wait for it fail at once; else a channel stays open until the last lease on it is given
back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import grpc
import structlog

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.errors import Mismatch, Unavailable
from flotilla_core.protocol import check_protocol
from flotilla_core.roles import POLICY, process_name
from flotilla_core.rpc.replica import Load, Replica
from flotilla_core.rpc.replica_health import until_serving, while_serving
from flotilla_core.rpc.routing import Routing
from flotilla_core.rpc.waiters import Waiters, Wish

StubT = TypeVar("StubT")

_STABLE_AFTER_S = 30.0

logger = structlog.get_logger()


class ReplicaPool(Generic[StubT]):
    """Channels to the instances of one kind (and role), fed with registry snapshots by `update`."""

    def __init__(
        self,
        kind: reg.ServiceKind.ValueType,
        stub: Callable[[grpc.aio.Channel], StubT],
        connect: Callable[[str], grpc.aio.Channel],
        *,
        role: str = "",
        size: str = "",
        overcommit: float = math.inf,
    ) -> None:
        """`size` names what of `Registration.capacity` says how much work an instance carries beside the others.

        An instance takes `overcommit` times what it runs at once; the rest waits here, for whoever is free first.
        """
        self._kind = kind
        self._size = size
        self._overcommit = overcommit
        self._role = role
        self._stub = stub
        self._connect = connect
        self._replicas: dict[str, Replica[StubT]] = {}
        self._refused: set[str] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._missing: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._waiters = Waiters(self._standing, self._room)
        self._routing = Routing()

    async def update(self, snapshot: dict[str, reg.Registration]) -> None:
        """Take in who exists now."""
        ours = {key: one for key, one in snapshot.items() if self._is_ours(one) and self._acceptable(one)}
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
                self._measure(known)
            elif registration.state == reg.INSTANCE_STATE_READY and not self._superseded(registration, ours):
                channel = self._connect(registration.address)
                known = Replica(registration, channel, self._stub(channel))
                self._measure(known)
                self._replicas[instance_id] = known
            if known is not None:
                self._follow_registration(known, self._superseded(registration, ours))
        self._waiters.look()

    def replicas(self) -> list[Replica[StubT]]:
        """Those that may get work now."""
        return [replica for replica in self._replicas.values() if replica.state == "ready"]

    def everyone(self) -> list[Replica[StubT]]:
        """All that are known, whatever their state."""
        return list(self._replicas.values())

    @contextmanager
    def lease(
        self, load: Load, *, allowed: Callable[[Replica[StubT]], bool] | None = None
    ) -> Iterator[Replica[StubT]]:
        """The allowed replica with the least outstanding cost for its size, charged with `load` inside the block."""
        replica = self._take(load, allowed)
        if replica is None:
            raise Unavailable(f"no {self._kind_name()} can take work", why=self._standing())
        try:
            yield replica
        finally:
            self.release(replica, load)

    async def acquire(
        self,
        load: Load,
        *,
        allowed: Callable[[Replica[StubT]], bool] | None = None,
        timeout_s: float,
        what: str,
        priority: int = 0,
        affinity: str = "",
    ) -> Replica[StubT]:
        """The same without a block: waits `timeout_s` for an allowed replica, and then for room on one.

        Work of one `affinity` goes where it went last, while there is room. Every `acquire` has one `release`.
        """
        wish = Wish(
            take=lambda: self._take(load, allowed, affinity),
            what=what,
            patience_s=timeout_s,
            within_reach=lambda: any(allowed is None or allowed(one) for one in self.replicas()),
            give_back=lambda replica: self.release(replica, load),
            priority=priority,
        )
        return await self._waiters.wait(wish)

    def release(self, replica: Replica[StubT], load: Load) -> None:
        """Give back what `acquire` took."""
        was_full = replica.full
        replica.give_back(load)
        if was_full:
            self._waiters.look()
        if replica.leases == 0 and self._replicas.get(replica.instance_id) is not replica:
            self._close(replica)

    def heard(self, replica: Replica[StubT], waiting: int) -> None:
        """A replica says how many of the places that it has wait for want of something else, its memory say."""
        was_full = replica.full
        replica.heard(waiting)
        if was_full and not replica.full:
            self._waiters.look()

    def eject(self, instance_id: str, why: str) -> None:
        """No more work until its health says SERVING again; for callers whose call failed."""
        replica = self._replicas.get(instance_id)
        if replica is None or replica.state != "ready":
            return
        now = asyncio.get_running_loop().time()
        replica.ejections = replica.ejections + 1 if now - replica.returned_at < _STABLE_AFTER_S else 1
        replica.state, replica.why = "ejected", why
        logger.warning("replica ejected", replica=replica.name, instance_id=instance_id, why=why)
        self._probes[instance_id] = asyncio.create_task(self._probe(replica), name=f"probe {replica.name}")
        self._waiters.look()

    def drain(self, instance_id: str, why: str) -> None:
        """No more work for as long as its process lives; what it was leased for goes on."""
        replica = self._replicas.get(instance_id)
        if replica is not None and replica.state != "draining":
            self._stop(self._probes, replica)
            replica.state, replica.why = "draining", why
            logger.info("replica drained", replica=replica.name, instance_id=instance_id, why=why)
            self._waiters.look()

    async def wait_for(self, count: int, timeout_s: float, what: str) -> None:
        """Wait until `count` replicas may get work."""
        await self._waiters.wait(Wish(lambda: len(self.replicas()) >= count or None, what, timeout_s))

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

    def _take(
        self, load: Load, allowed: Callable[[Replica[StubT]], bool] | None, affinity: str = ""
    ) -> Replica[StubT] | None:
        candidates = [
            replica
            for replica in self._replicas.values()
            if replica.state == "ready" and not replica.full and (allowed is None or allowed(replica))
        ]
        if not candidates:
            return None
        replica = self._routing.choose(candidates, affinity)
        replica.take(load)
        return replica

    def _room(self) -> bool:
        return any(replica.state == "ready" and not replica.full for replica in self._replicas.values())

    def _measure(self, replica: Replica[StubT]) -> None:
        """By what it says of itself; where it says nothing, all count alike and take whatever comes."""
        size = int(replica.registration.capacity.get(self._size, 0))
        if size != replica.size:
            replica.size = replica.runs = size or 1
        replica.overcommit = self._overcommit if size else math.inf

    def _is_ours(self, registration: reg.Registration) -> bool:
        return registration.kind == self._kind and (
            not self._role or self._role == (registration.role or POLICY)
        )

    def _acceptable(self, registration: reg.Registration) -> bool:
        """Whether its build can talk to ours; a refusal is logged once."""
        try:
            check_protocol(registration)
        except Mismatch as error:
            if registration.instance_id not in self._refused:
                self._refused.add(registration.instance_id)
                logger.error("replica refused", replica=registration.name, why=str(error))
            return False
        return True

    def _superseded(self, registration: reg.Registration, ours: dict[str, reg.Registration]) -> bool:
        """Whether a later process fills the same slot: then this one is dead, registered or not."""
        return any(
            other.name == registration.name
            and other.instance_id != registration.instance_id
            and other.started_at.ToNanoseconds() > registration.started_at.ToNanoseconds()
            for other in ours.values()
        )

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
        if self._superseded(replica.registration, ours):
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
            self._waiters.look()

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

    async def _probe(self, replica: Replica[StubT]) -> None:
        await until_serving(replica)
        self._probes.pop(replica.instance_id, None)
        replica.state, replica.why = "ready", ""
        replica.returned_at = asyncio.get_running_loop().time()
        logger.info("replica is back", replica=replica.name, instance_id=replica.instance_id)
        self._waiters.look()

    def _kind_name(self) -> str:
        """What to call one in messages."""
        kind = reg.ServiceKind.Name(self._kind).removeprefix("SERVICE_KIND_").lower()
        return process_name(self._role) if self._role else kind

    def _standing(self) -> str:
        if not self._replicas:
            return f"no {self._kind_name()} is registered"
        return ", ".join(
            f"{one.name} is {one.state}" + (f" ({one.why})" if one.why else "")
            for one in self._replicas.values()
        )
