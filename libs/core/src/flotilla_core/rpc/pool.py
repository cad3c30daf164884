"""The replicas of one kind, or of one role within it: who may get work, who gets the next, and who waits for one.

Invariants: only a ready replica gets work; a caller whose call failed ejects the replica at once, long before the
registry notices. Of several replicas the one with the least outstanding cost for its size is next, and of equals the
one that was leased longest ago; work of one affinity stays where it was as long as that replica is among those that may
take it.

Callers that wait are served together, with one timer and one look for all of them, whenever a replica or room on one
may have come: the lowest priority is served first, and equals in order of arrival; a caller that cannot be served yet
blocks no other; what was taken for a caller that is cancelled in the same moment is given back; a wait ends in an error
when no replica can serve it and none could when its time was last checked.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.errors import Unavailable
from flotilla_core.kinds import kind_of
from flotilla_core.logger import get_logger
from flotilla_core.rpc.replica_set import Load, Replica, ReplicaSet

StubT = TypeVar("StubT")

ReplicaT = TypeVar("ReplicaT", bound=Replica[Any])

AFFINITIES_KEPT = 65_536

T = TypeVar("T")

NAME_THE_WAIT_AFTER_S = 10.0
# What a caller may take can depend on state that is not reported, so all of them are asked again.
LOOK_AGAIN_S = 0.25

logger = get_logger()


class ReplicaPool(Generic[StubT]):
    """Channels to the instances of one kind (and role), fed with registry snapshots by `update`."""

    def __init__(
        self,
        kind: reg.ServiceKind.ValueType,
        stub: Callable[[grpc.aio.Channel], StubT],
        connect: Callable[[str], grpc.aio.Channel],
        *,
        role: str = "",
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`on_wait` is called for a wait that has become long."""
        self._kind = kind_of(kind)
        self._replicas = ReplicaSet(kind, role, stub, connect, changed=self._look)
        self._waiters = Waiters(self._replicas.describe, self._room, on_wait)
        self._routing = Routing()

    async def update(self, snapshot: dict[str, reg.Registration]) -> None:
        """Update the pool from a registry snapshot."""
        self._replicas.update(snapshot)
        for replica in self._replicas.everyone():
            self._measure(replica)
        self._look()

    def replicas(self) -> list[Replica[StubT]]:
        """Return the replicas that may get work now."""
        return list(self._replicas.ready())

    def everyone(self) -> list[Replica[StubT]]:
        """Return the known replicas, in any state."""
        return self._replicas.everyone()

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
        """Return the allowed replica with the least outstanding cost for its size; charge `load` until `release`.

        Waits `timeout_s` for an allowed replica, and then for room on one. Work of one `affinity` goes where it went
        last, while there is room.
        """
        request = WaitRequest(
            take=lambda: self._take(load, allowed, affinity),
            what=what,
            timeout_s=timeout_s,
            possible=lambda: any(allowed is None or allowed(one) for one in self._replicas.ready()),
            give_back=lambda replica: self.release(replica, load),
            priority=priority,
        )
        return await self._waiters.wait(request)

    def release(self, replica: Replica[StubT], load: Load) -> None:
        """Give back what `acquire` took."""
        was_full = replica.full
        replica.give_back(load)
        if was_full:
            self._look()
        self._replicas.given_back(replica)

    def heard(self, replica: Replica[StubT], waiting: int) -> None:
        """Record how many samples wait on a replica for another reason than places, usually memory."""
        was_full = replica.full
        replica.heard(waiting)
        if was_full and not replica.full:
            self._look()

    def eject(self, instance_id: str, why: str, *, replaceable: bool = True) -> None:
        """Give the replica no more work until its health says SERVING again; for callers whose call failed."""
        self._replicas.eject(instance_id, why, replaceable=replaceable)
        self._look()

    def drain(self, instance_id: str, why: str) -> None:
        """Give the replica no more work for as long as its process lives; running leases continue."""
        self._replicas.drain(instance_id, why)
        self._look()

    def dismiss(self, instance_id: str, why: str) -> None:
        """Remove the replica from the pool, whatever its health; running leases continue."""
        self._replicas.dismiss(instance_id, why)
        self._look()

    async def wait_for(self, count: int, timeout_s: float, what: str) -> None:
        """Wait until `count` replicas may get work."""
        await self._waiters.wait(WaitRequest(lambda: len(self.replicas()) >= count or None, what, timeout_s))

    async def close(self) -> None:
        """Close every channel; calls that still run are cancelled."""
        await self._replicas.close()

    def _look(self) -> None:
        self._waiters.look()

    def _take(
        self, load: Load, allowed: Callable[[Replica[StubT]], bool] | None, affinity: str
    ) -> Replica[StubT] | None:
        def fits(replica: Replica[StubT]) -> bool:
            return not replica.full and (allowed is None or allowed(replica))

        last = self._replicas.ready_one(self._routing.last(affinity)) if affinity else None
        # Nearly all work of an affinity goes where it went last: the others need no look then.
        candidates = [last] if last is not None and fits(last) else [*filter(fits, self._replicas.ready())]
        if not candidates:
            return None
        replica = self._routing.choose(candidates, affinity)
        replica.take(load)
        return replica

    def _room(self) -> bool:
        return any(not replica.full for replica in self._replicas.ready())

    def _measure(self, replica: Replica[StubT]) -> None:
        """Measure a replica by its registration; without a capacity all count alike and take any work."""
        size = int(replica.registration.capacity.get(self._kind.capacity, 0))
        if size != replica.size:
            replica.size = replica.runs = size or 1
        replica.overcommit = self._kind.overcommit if size else math.inf


class Routing:
    """The choice of the replica for the next work.

    Remembers how long ago each replica was leased, and which replica had the last work of each affinity.
    """

    def __init__(self) -> None:
        self._leases = 0
        self._last: dict[str, str] = {}

    def last(self, affinity: str) -> str:
        """Return the instance that had the last work of an affinity; empty where none is known."""
        return self._last.get(affinity, "")

    def choose(self, candidates: Sequence[ReplicaT], affinity: str = "") -> ReplicaT:
        """Choose one of the replicas that may take the work."""
        chosen = min(candidates, key=lambda one: (one.outstanding / one.size, one.last_leased))
        self._leases += 1
        chosen.last_leased = self._leases
        if affinity:
            self._last.pop(affinity, None)
            self._last[affinity] = chosen.instance_id
            if len(self._last) > AFFINITIES_KEPT:
                del self._last[next(iter(self._last))]
        return chosen


@dataclass(frozen=True)
class WaitRequest(Generic[T]):
    """The request of one waiting caller."""

    take: Callable[[], T | None]
    """Returns the result as soon as there is one, else None."""
    what: str
    """The awaited thing in words, for messages."""
    timeout_s: float
    possible: Callable[[], bool] = lambda: False
    """Returns whether the caller only waits for its place: then its time is not used up."""
    give_back: Callable[[T], None] = lambda taken: None
    priority: int = 0
    """Lower priorities come first."""


@dataclass(order=True)
class _Waiter:
    """One caller and its result."""

    priority: int
    number: int
    request: WaitRequest[Any] = field(compare=False)
    since: float = field(compare=False)
    gives_up_at: float = field(compare=False)
    reachable: bool = field(compare=False)
    """True where any replica could have served it at the last look."""
    taken: asyncio.Future[Any] = field(compare=False)
    named: bool = field(default=False, compare=False)


class Waiters:
    """The waiting callers of one pool.

    `describe` reports the state of its replicas, and `room` whether any of them could take work. `on_wait` is called
    for a wait that has become long, with the time until which it may last.
    """

    def __init__(
        self, describe: Callable[[], str], room: Callable[[], bool], on_wait: Callable[[str], None]
    ) -> None:
        self._describe = describe
        self._room = room
        self._on_wait = on_wait
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, request: WaitRequest[T]) -> T:
        """Return the result of `request.take` as soon as there is one."""
        # The callers that wait already were asked at the last change, so none of them can use what is free now.
        taken = request.take()
        if taken is not None:
            return taken
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiter = _Waiter(
            request.priority,
            next(self._numbers),
            request,
            since=now,
            gives_up_at=now + request.timeout_s,
            reachable=request.possible(),
            taken=loop.create_future(),
        )
        bisect.insort(self._waiting, waiter)
        self._look_again_later()
        try:
            handed_over: T = await self._handed_over(waiter)
            return handed_over
        finally:
            self._remove(waiter)

    def look(self) -> None:
        """Serve every caller that can be served now; call it after a change."""
        if not self._waiting or not self._room():
            return
        for waiter in self._waiting:
            if waiter.taken.done():
                continue
            taken = waiter.request.take()
            if taken is not None:
                waiter.taken.set_result(taken)
                if not self._room():
                    return

    @staticmethod
    async def _handed_over(waiter: _Waiter) -> Any:
        try:
            return await waiter.taken
        except asyncio.CancelledError:
            taken = waiter.taken
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                waiter.request.give_back(taken.result())
            raise

    def _remove(self, waiter: _Waiter) -> None:
        del self._waiting[bisect.bisect_left(self._waiting, waiter)]

    def _look_again_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        now = asyncio.get_running_loop().time()
        for waiter in self._waiting:
            if now >= waiter.gives_up_at and not waiter.taken.done():
                self._end_or_extend(waiter, now)
        if self._waiting:
            self._name_the_longest_wait(now)
            self._look_again_later()

    def _end_or_extend(self, waiter: _Waiter, now: float) -> None:
        request, was_reachable = waiter.request, waiter.reachable
        waiter.reachable = request.possible()
        if waiter.reachable or was_reachable:
            waiter.gives_up_at = now + request.timeout_s
            return
        waiter.taken.set_exception(
            Unavailable(
                f"waited {request.timeout_s:g} s for {request.what}",
                why=self._describe(),
                next_step="See flotilla ps.",
            )
        )

    def _name_the_longest_wait(self, now: float) -> None:
        """Report the longest wait among callers that wait for more than their place."""
        longest = min(self._waiting, key=lambda waiter: waiter.since)
        late = now - longest.since >= NAME_THE_WAIT_AFTER_S
        if late and not longest.named and not longest.request.possible():
            longest.named = True
            what, standing = longest.request.what, self._describe()
            logger.info("waiting", what=what, callers=len(self._waiting), standing=standing)
            left = longest.gives_up_at - now
            self._on_wait(f"waiting for {what}, for at most {left:.0f} s more: {standing}")
