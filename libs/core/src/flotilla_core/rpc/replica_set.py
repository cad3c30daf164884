"""The replicas of one kind, or of one role within it, and the state of each.

Invariants: a replica is ready when it is READY in the registry and has not failed since its last SERVING; an ejected
one comes back only through its health check; one that the registry lost is asked directly, for the registry sees only
heartbeats: it stays while it serves, and when it does not answer, the calls that wait for it fail at once; otherwise a
channel stays open until the last lease on it is released; an instance with an incompatible protocol is never a replica,
and is listed as refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core.errors import FlotillaError
from flotilla_core.kinds import kind_name
from flotilla_core.logger import get_logger
from flotilla_core.protocol import limits, refusal
from flotilla_core.roles import POLICY, holds_judge, process_name
from flotilla_core.rpc.calls import unary

StubT = TypeVar("StubT")

_STABLE_AFTER_S = 30.0

logger = get_logger()

# ready: takes work. ejected: a call failed and its health is probed, or its build is another one. draining: it never
# takes work again.
ReplicaState = Literal["ready", "ejected", "draining"]

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 2.0
# A replica that fails again soon after it came back stays out longer each time.
LONGEST_PROBE_INTERVAL_S = 10.0
# Who is missing from the registry was silent for long: only an answer keeps it.
MISSING_TIMEOUT_S = 5.0
ASK_MISSING_EVERY_S = 5.0

_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True)
class Load:
    """The load that a lease puts on a replica."""

    cost: int
    """The unit by which replicas are compared: tokens, items."""
    places: int = 1
    """The number of parallel places that the work takes."""


@dataclass(eq=False)
class Replica(Generic[StubT]):
    """A channel to one instance, and our work on it."""

    registration: Registration
    channel: grpc.aio.Channel
    stub: StubT
    size: int = 1
    """The capacity of the replica relative to the others."""
    overcommit: float = math.inf
    """The multiple of what it runs at once that it takes; more work would only wait there and can go elsewhere."""
    runs: int = 1
    """Places that it runs in parallel, as far as is known."""
    state: ReplicaState = "ready"
    outstanding: int = 0
    """Cost of the work that is leased to it."""
    places: int = 0
    """Places that this work takes."""
    leases: int = 0
    """Number of leases; the channel stays open until none is left."""
    why: str = ""
    """The reason why it is not ready."""
    last_leased: int = 0
    """The number of its last lease: of equal replicas the one with the lowest is next."""
    ejections: int = field(default=0, repr=False)
    returned_at: float = field(default=0.0, repr=False)
    _busy_before_s: float = field(default=0.0, repr=False)
    _busy_since: float = field(default=0.0, repr=False)

    @property
    def full(self) -> bool:
        """Return whether further work would wait there."""
        return self.places >= self.overcommit * self.runs

    def heard(self, waiting: int) -> None:
        """Record how many of its places wait: it runs the others, whatever its registration says."""
        self.runs = min(self.size, max(1, self.places - waiting)) if waiting else self.size

    def take(self, load: Load) -> None:
        """Add a lease."""
        if self.leases == 0:
            self._busy_since = time.monotonic()
        self.outstanding += load.cost
        self.places += load.places
        self.leases += 1

    def give_back(self, load: Load) -> None:
        """Remove a lease."""
        self.outstanding -= load.cost
        self.places -= load.places
        self.leases -= 1
        if self.leases == 0:
            self._busy_before_s += time.monotonic() - self._busy_since

    @property
    def busy_s(self) -> float:
        """The total time so far in which it had any lease of ours."""
        return self._busy_before_s + (time.monotonic() - self._busy_since if self.leases else 0.0)

    @property
    def instance_id(self) -> str:
        return self.registration.instance_id

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def address(self) -> str:
        return self.registration.address


class ReplicaSet(Generic[StubT]):
    """The replicas of one pool; `changed` is called when one comes back or goes without a snapshot."""

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
        """The reason of each refusal, by instance."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._missing: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, snapshot: dict[str, reg.Registration]) -> None:
        """Update the set from a registry snapshot."""
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
                if less := limits(registration):
                    logger.warning("replica of an older release", replica=known.name, limits=less)
            if known is not None:
                self._follow_registration(known, _superseded(registration, ours))

    def everyone(self) -> list[Replica[StubT]]:
        """Return the known replicas, in any state."""
        return list(self._replicas.values())

    def ready(self) -> Iterator[Replica[StubT]]:
        """Yield the replicas that may get work now."""
        return (replica for replica in self._replicas.values() if replica.state == "ready")

    def ready_one(self, instance_id: str) -> Replica[StubT] | None:
        """Return this replica, where it may get work now."""
        replica = self._replicas.get(instance_id)
        return replica if replica is not None and replica.state == "ready" else None

    def eject(self, instance_id: str, why: str, *, replaceable: bool = True) -> None:
        """Take a replica out until its health says SERVING; repeated failures take it out longer: others fill in."""
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
        """Take a replica out for as long as its process lives."""
        replica = self._replicas.get(instance_id)
        if replica is not None and replica.state != "draining":
            self._stop(self._probes, replica)
            replica.state, replica.why = "draining", why
            logger.info("replica drained", replica=replica.name, instance_id=instance_id, why=why)

    def dismiss(self, instance_id: str, why: str) -> None:
        """Remove a replica from the set."""
        replica = self._replicas.pop(instance_id, None)
        if replica is not None:
            self._retire(replica, why)

    def given_back(self, replica: Replica[StubT]) -> None:
        """Close the channel of a removed replica after its last lease has ended."""
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

    def describe(self) -> str:
        """Describe the state of all replicas in words."""
        known = [
            f"{one.name} is {one.state}" + (f" ({one.why})" if one.why else "")
            for one in self._replicas.values()
        ]
        refused = [f"refused: {why}" for why in self._refused.values()]
        return ", ".join(known + refused) or f"no {self._kind_name()} is available"

    def _is_ours(self, registration: reg.Registration) -> bool:
        if registration.kind != self._kind:
            return False
        if self._role:
            return self._role == (registration.role or POLICY)
        return not holds_judge(registration.name)

    def _refuse(self, refused: dict[str, str]) -> None:
        """Refuse the instances whose builds cannot talk to ours; log each once."""
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
        """Handle a replica that left the registry: it stopped, it hangs, or only its heartbeats were lost."""
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
        """Stop the task that watches this replica, if there is one."""
        task = tasks.pop(replica.instance_id, None)
        if task is not None:
            task.cancel()

    def _kind_name(self) -> str:
        """Return the name of the kind for messages."""
        return process_name(self._role) if self._role else kind_name(self._kind)


def _superseded(registration: reg.Registration, ours: dict[str, reg.Registration]) -> bool:
    """Return whether a later process fills the same slot: then this one is dead, registered or not."""
    return any(
        other.name == registration.name
        and other.instance_id != registration.instance_id
        and other.started_at.ToNanoseconds() > registration.started_at.ToNanoseconds()
        for other in ours.values()
    )


async def until_serving(replica: Replica[Any]) -> None:
    """Probe a replica whose call failed, until it serves again."""
    interval_s = min(PROBE_INTERVAL_S * 2 ** (replica.ejections - 1), LONGEST_PROBE_INTERVAL_S)
    await asyncio.sleep(interval_s)
    while await _health(replica, PROBE_TIMEOUT_S, attempts=1) != _SERVING:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(interval_s)


async def while_serving(replica: Replica[Any]) -> bool:
    """Probe a replica that the registry lost, as long as it serves; return whether it answered in the end."""
    while (status := await _health(replica, MISSING_TIMEOUT_S)) == _SERVING:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(ASK_MISSING_EVERY_S)
    return status is not None


async def _health(replica: Replica[Any], timeout_s: float, attempts: int = 4) -> int | None:
    """Return its own health report; None without an answer."""
    health: Any = health_pb2_grpc.HealthStub(replica.channel)
    try:
        answer = await unary(
            health.Check, health_pb2.HealthCheckRequest(), timeout_s=timeout_s, attempts=attempts
        )
    except FlotillaError:
        return None
    status: int = answer.status
    return status
