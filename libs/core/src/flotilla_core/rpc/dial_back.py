"""Dials the address that each service advertises before anybody gives it work.

Invariants: a registration that says READY is shown as STARTING until the instance itself has answered at its address,
and from then on as it is: each registration but a coordinator's is dialled until it answers once. What answered is
remembered while it is in the registry, and the last few thousand of those that left are too: one that comes back is not
dialled again. An address that only the host of the service can reach is refused by name. Anybody who may write to NATS
can write a registration: so who answers says itself what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeAlias

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.common.v1.operate_pb2 import DescribeRequest
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla_core.addresses import host_of, is_loopback
from flotilla_core.errors import FlotillaError
from flotilla_core.kinds import kind_name
from flotilla_core.logger import get_logger
from flotilla_core.protocol import refusal
from flotilla_core.rpc.calls import unary

DIAL_S = 5.0
AGAIN_S = 1.0
MOST_REACHED = 10_000
"""Registrations that are remembered as reached; the one that was in the registry longest ago is forgotten first."""

Snapshot: TypeAlias = dict[str, reg.Registration]
Key: TypeAlias = tuple[str, str, str]
"""Instance, who it says that it is, and address."""

logger = get_logger()


class DialBack:
    """Admits the registrations of one registry watch."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._connect = connect
        self._host = socket.gethostname()
        self._latest: Snapshot = {}
        self._reached: OrderedDict[Key, None] = OrderedDict()
        """The registrations that have answered."""
        self._dials: dict[Key, asyncio.Task[None]] = {}
        self._why: dict[Key, str] = {}
        self._news = asyncio.Event()

    async def follow(
        self, snapshots: AsyncIterator[Snapshot]
    ) -> AsyncGenerator[tuple[Snapshot, dict[str, str]], None]:
        """Yield what may be used, and why the rest is not ready by instance, at each change of either."""
        watching = asyncio.create_task(self._watch(snapshots), name="dial back: watch")
        watching.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if watching.done():
                    watching.result()
                    return
                yield (
                    {key: self._shown(one) for key, one in self._latest.items()},
                    {instance: why for (instance, *_), why in self._why.items()},
                )
        finally:
            tasks = [watching, *self._dials.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, snapshots: AsyncIterator[Snapshot]) -> None:
        async for snapshot in snapshots:
            self._latest = dict(snapshot)
            known = {_key(one) for one in snapshot.values()}
            # What answered once stays admitted: shown as STARTING after a pause of its process, it would be drained.
            for gone in self._dials.keys() - known:
                self._dials.pop(gone).cancel()
            for gone in self._why.keys() - known:
                del self._why[gone]
            for here in known & self._reached.keys():
                self._reached.move_to_end(here)
            for one in snapshot.values():
                if self._waits(one) and _key(one) not in self._dials:
                    self._dials[_key(one)] = asyncio.create_task(self._dial(one), name=f"dial {one.name}")
            self._news.set()

    def _waits(self, one: reg.Registration) -> bool:
        return (
            one.state == reg.INSTANCE_STATE_READY
            # A coordinator gets no work: it is this one, or the one before it, which is gone.
            and one.kind != reg.SERVICE_KIND_COORDINATOR
            and _key(one) not in self._reached
            and not refusal(one)  # It is refused by name already, and may not have the call.
        )

    def _shown(self, one: reg.Registration) -> reg.Registration:
        if not self._waits(one):
            return one
        shown = reg.Registration()
        shown.CopyFrom(one)
        shown.state = reg.INSTANCE_STATE_STARTING
        return shown

    async def _dial(self, one: reg.Registration) -> None:
        while why := await self._why_not(one):
            if self._why.get(_key(one)) != why:
                self._why[_key(one)] = why
                logger.warning("a service is not admitted", service=one.name, why=why)
                self._news.set()
            await asyncio.sleep(AGAIN_S)
        self._reached[_key(one)] = None
        while len(self._reached) > max(MOST_REACHED, len(self._latest)):
            self._reached.popitem(last=False)
        self._why.pop(_key(one), None)
        self._dials.pop(_key(one), None)
        self._news.set()

    async def _why_not(self, one: reg.Registration) -> str:
        """Return why the address is not that of the instance; empty where the instance answers there."""
        if one.host != self._host and is_loopback(host_of(one.address)):
            return (
                f"it advertises the loopback address {one.address} on host {one.host}, and the coordinator is on "
                f"{self._host}: set bind.host or bind.advertise_host in the stack file of {one.host} to an address "
                "that other hosts reach"
            )
        channel = self._connect(one.address)
        try:
            answer = await unary(
                OperateServiceStub(channel).Describe, DescribeRequest(), timeout_s=DIAL_S, attempts=1
            )
        except FlotillaError as error:
            return (
                f"its address {one.address} does not answer the coordinator on {self._host} "
                f"({error.why or error.what}): "
                + (
                    error.next_step
                    or f"open that port between the hosts, or set bind.advertise_host on {one.host}"
                )
            )
        finally:
            with contextlib.suppress(FlotillaError):
                await channel.close()
        if (found := _who(answer.registration)) != _who(one):
            return (
                f"at its address {one.address} answers {found}: set bind.advertise_host on {one.host} to an address of "
                "its own"
            )
        return ""


def _who(one: reg.Registration) -> str:
    # A newer release may have kinds that this build does not know.
    kind = kind_name(one.kind) if one.kind in reg.ServiceKind.values() else f"kind {one.kind}"
    role = f" of role {one.role}" if one.role else ""
    return f"{one.instance_id}, the {kind} {one.name}{role}"


def _key(one: reg.Registration) -> Key:
    # Another kind or name under a known instance is another claim, which nobody has answered for.
    return one.instance_id, _who(one), one.address
