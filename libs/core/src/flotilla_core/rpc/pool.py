"""The replicas of one kind, or of one role within it: who may get work, and who gets the next.

Invariants: only a ready replica gets work; a caller whose call failed ejects the replica at once, long before the
registry notices; what waits for a replica or for room is looked at whenever either may have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.rpc.replica import Load, Replica
from flotilla_core.rpc.roster import Roster
from flotilla_core.rpc.routing import Routing
from flotilla_core.rpc.waiters import Waiters, Wish

StubT = TypeVar("StubT")


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
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`size` names what of `Registration.capacity` says how much work an instance carries beside the others.

        An instance takes `overcommit` times what it runs at once; the rest waits here, for whoever is free first.
        `on_wait` is told of a wait that has become long.
        """
        self._size = size
        self._overcommit = overcommit
        self._roster = Roster(kind, role, stub, connect, changed=self._look)
        self._waiters = Waiters(self._roster.standing, self._room, on_wait)
        self._routing = Routing()

    async def update(self, snapshot: dict[str, reg.Registration]) -> None:
        """Take in who exists now."""
        self._roster.update(snapshot)
        for replica in self._roster.everyone():
            self._measure(replica)
        self._look()

    def replicas(self) -> list[Replica[StubT]]:
        """Those that may get work now."""
        return list(self._roster.ready())

    def everyone(self) -> list[Replica[StubT]]:
        """All that are known, whatever their state."""
        return self._roster.everyone()

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
        """The allowed replica with the least outstanding cost for its size, charged with `load` until its `release`.

        Waits `timeout_s` for an allowed replica, and then for room on one. Work of one `affinity` goes where it went
        last, while there is room.
        """
        wish = Wish(
            take=lambda: self._take(load, allowed, affinity),
            what=what,
            patience_s=timeout_s,
            within_reach=lambda: any(allowed is None or allowed(one) for one in self._roster.ready()),
            give_back=lambda replica: self.release(replica, load),
            priority=priority,
        )
        return await self._waiters.wait(wish)

    def release(self, replica: Replica[StubT], load: Load) -> None:
        """Give back what `acquire` took."""
        was_full = replica.full
        replica.give_back(load)
        if was_full:
            self._look()
        self._roster.given_back(replica)

    def heard(self, replica: Replica[StubT], waiting: int) -> None:
        """A replica says how many of the places that it has wait for want of something else, its memory say."""
        was_full = replica.full
        replica.heard(waiting)
        if was_full and not replica.full:
            self._look()

    def eject(self, instance_id: str, why: str, *, replaceable: bool = True) -> None:
        """No more work until its health says SERVING again; for callers whose call failed."""
        self._roster.eject(instance_id, why, replaceable=replaceable)
        self._look()

    def drain(self, instance_id: str, why: str) -> None:
        """No more work for as long as its process lives; what it was leased for goes on."""
        self._roster.drain(instance_id, why)
        self._look()

    def dismiss(self, instance_id: str, why: str) -> None:
        """It is not ours any more, however well it is; what it was leased for goes on."""
        self._roster.dismiss(instance_id, why)
        self._look()

    async def wait_for(self, count: int, timeout_s: float, what: str) -> None:
        """Wait until `count` replicas may get work."""
        await self._waiters.wait(Wish(lambda: len(self.replicas()) >= count or None, what, timeout_s))

    async def close(self) -> None:
        """Close every channel; calls that still run are cancelled."""
        await self._roster.close()

    def _look(self) -> None:
        self._waiters.look()

    def _take(
        self, load: Load, allowed: Callable[[Replica[StubT]], bool] | None, affinity: str
    ) -> Replica[StubT] | None:
        candidates = [
            replica
            for replica in self._roster.ready()
            if not replica.full and (allowed is None or allowed(replica))
        ]
        if not candidates:
            return None
        replica = self._routing.choose(candidates, affinity)
        replica.take(load)
        return replica

    def _room(self) -> bool:
        return any(not replica.full for replica in self._roster.ready())

    def _measure(self, replica: Replica[StubT]) -> None:
        """By what it says of itself; where it says nothing, all count alike and take whatever comes."""
        size = int(replica.registration.capacity.get(self._size, 0))
        if size != replica.size:
            replica.size = replica.runs = size or 1
        replica.overcommit = self._overcommit if size else math.inf
