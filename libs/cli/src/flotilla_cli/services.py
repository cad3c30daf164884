"""Finds the services of a stack: those of this machine through its launcher, the others through its coordinator.

Invariant: the launcher's services are found without a coordinator, so they can be called while the coordinator hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1.coordinator_pb2 import Service
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_cli.output import say
from flotilla_cli.stack import load_stack, stack_paths
from flotilla_client import Client
from flotilla_client.discovery import credential_of_caller, find_coordinator
from flotilla_core import rpc
from flotilla_core.config import StackConfig
from flotilla_core.errors import FlotillaError, NotFound, Unavailable
from flotilla_core.trust import Credential
from flotilla_launch.launcher import launcher_of
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import is_up

if TYPE_CHECKING:
    import grpc.aio

    # A class of the typed stubs only.
    from flotilla.common.v1.operate_pb2_grpc import OperateServiceAsyncStub

_ANSWER_S = 2.0
"""The limit for the coordinator, where the services of this machine are known without it."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ServiceAddress:
    """A service of the stack that may be called."""

    name: str
    kind: ServiceKind.ValueType
    address: str
    credential: Credential = field(repr=False)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection for the time of the block."""
        channel = rpc.connect(self.address, credential=self.credential)
        try:
            yield channel
        finally:
            await channel.close()

    @asynccontextmanager
    async def operated(self) -> AsyncIterator[OperateServiceAsyncStub]:
        """Provide the calls that every service answers, for the time of the block."""
        async with self.channel() as channel:
            yield OperateServiceStub(channel)


async def find_services(
    stack: str | None, coordinator: str | None, *, enough: str | None = None
) -> dict[str, ServiceAddress]:
    """List every service that has an address; skip the coordinator where the service `enough` is found here."""
    config, paths = load_stack(stack), stack_paths(stack)
    here = [] if coordinator is not None else await _of_launcher(config, paths)
    everywhere: list[ServiceAddress] = []
    if enough not in {service.name for service in here}:
        try:
            async with asyncio.timeout(_ANSWER_S if here else None):
                everywhere = await _of_coordinator(config, coordinator)
        except (Unavailable, TimeoutError):
            if not here:
                raise
            say("the coordinator does not answer: only the services of this machine are known")
    found = {service.name: service for service in [*everywhere, *here]}
    return dict(sorted(found.items()))


async def find_service(name: str, stack: str | None, coordinator: str | None) -> ServiceAddress:
    """Find one service by its name."""
    services = await find_services(stack, coordinator, enough=name)
    if name not in services:
        raise NotFound(
            f"there is no running service {name!r}",
            next_step=f"name one of: {', '.join(services)}" if services else "see: flotilla ps",
        )
    return services[name]


async def is_kept_up(stack: str | None, *, name: str = "", address: str = "") -> bool:
    """Return whether the launcher of this machine starts the service of this name, or address, again when it ends."""
    return any(
        (process.address == address if address else process.name == name)
        and process.state != ProcessState.PROCESS_STATE_ATTACHED
        for process in await _processes(stack_paths(stack))
    )


async def _of_launcher(config: StackConfig, paths: StackPaths) -> list[ServiceAddress]:
    """List those that the launcher of this machine started or attached; none where no launcher answers."""
    try:
        processes = await _processes(paths)
    except Unavailable:
        return []
    credential = credential_of_caller(config.bind, paths.directory)
    return [
        ServiceAddress(process.name, process.kind, process.address, credential)
        for process in processes
        if process.kind and process.address
    ]


async def _processes(paths: StackPaths) -> list[ProcessStatus]:
    """List what the launcher of the stack keeps or watches; nothing where no launcher has it."""
    return list((await launcher_of(paths).state()).processes) if is_up(paths) else []


async def _of_coordinator(config: StackConfig, coordinator: str | None) -> list[ServiceAddress]:
    found = find_coordinator(config.name, config.state_dir, coordinator, bind=config.bind)
    async with Client(found.address, credential=found.credential) as client:
        services = await client.list_services()
    return [
        ServiceAddress(
            one.registration.name, one.registration.kind, one.registration.address, found.credential
        )
        for one in services
        if one.registration.address
    ]


async def services_seen(
    paths: StackPaths, coordinator: str | None = None, *, within_s: float = _ANSWER_S
) -> dict[str, Service]:
    """Return the coordinator's view of the services by name; empty while it cannot be reached."""
    found = await answer_soon(paths, coordinator, lambda client: client.list_services(), within_s) or []
    return {service.registration.name: service for service in found}


async def answer_soon(
    paths: StackPaths,
    coordinator: str | None,
    question: Callable[[Client], Awaitable[Answer]],
    within_s: float = _ANSWER_S,
) -> Answer | None:
    """Return the coordinator's answer; None while it cannot be reached."""
    try:
        async with Client.find(paths.directory.name, paths.directory.parent, coordinator) as client:
            return await asyncio.wait_for(question(client), within_s)
    except (FlotillaError, TimeoutError):
        return None
