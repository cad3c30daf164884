"""The model of a service that runs where its folder is not: fetched from the coordinator before the service is built.

Invariants: a folder or a hub name that this host has, or can get from the hub, is used as before; one in object storage
is fetched from there, by the coordinator too, and from the coordinator where this host cannot; a generator and a
trainer ask for the model of their own role, and rewards for those of the judges that they ask. A coordinator is found
in the registry, or where the stack file says.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from pathlib import Path

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.bus import Registry
from flotilla_core.config import StackConfig
from flotilla_core.config.model import is_url
from flotilla_core.errors import FlotillaError, NotFound, Unavailable
from flotilla_core.gangs import model_of, model_roles, with_model
from flotilla_core.kinds import WITH_MODEL
from flotilla_core.logger import get_logger
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import POLICY, holds_judge, role_of_process
from flotilla_core.service.host import Host
from flotilla_core.transfer import Files

_ALIVE = (reg.INSTANCE_STATE_STARTING, reg.INSTANCE_STATE_READY)

logger = get_logger()


def offer_models(host: Host) -> None:
    """Offer the models of a stack to services on hosts that do not have them."""
    for role in model_roles(host.stack):
        host.files.offers.offer_model(name_of_model(role), partial(_folder, host.stack, role))


def _folder(stack: StackConfig, role: str) -> Path:
    return model_folder(model_of(stack, role))


def name_of_model(role: str) -> str:
    """Return the name under which the coordinator offers the model of a role."""
    return f"model of {role}"


async def bring_model(host: Host) -> None:
    """Replace the model that the service needs by its folder on this host, which may be a copy."""
    if host.kind == reg.SERVICE_KIND_COORDINATOR:
        host.stack = await with_copies(host.stack, host.files)
    if host.kind not in WITH_MODEL:
        return
    is_generator = host.kind == reg.SERVICE_KIND_GENERATOR
    # To the generator of a judge its model is that of the stack.
    section = POLICY if is_generator else role_of_process(host.name)
    role = role_of_process(host.name) if holds_judge(host.name) else section
    model = model_of(host.stack, section)
    host.stack = with_model(host.stack, section, await model_here(model, role, host.files))


async def model_here(model: Path | str, role: str, files: Files) -> Path:
    """Return the folder of a role's model on this host: its own, else a copy."""
    try:
        if is_url(model):
            return await files.fetch_url(str(model))
        return await asyncio.to_thread(model_folder, model)
    except FlotillaError as missing:
        logger.info("the model is not on this host", model=str(model), why=missing.why)
        try:
            return await files.fetch(name_of_model(role), what=f"the model {model}")
        except FlotillaError as error:
            raise NotFound(
                missing.what,
                where=missing.where,
                why=f"{missing.why + '; ' if missing.why else ''}the coordinator did not give it either: {error}",
                next_step=missing.next_step,
            ) from error


async def with_copies(stack: StackConfig, files: Files) -> StackConfig:
    """Return the stack with a copy on this host in place of each model that lies in object storage."""
    for role in model_roles(stack):
        model = model_of(stack, role)
        if is_url(model):
            stack = with_model(stack, role, await files.fetch_url(str(model)))
    return stack


async def coordinator_address(registry: Registry, stack: StackConfig) -> str:
    """Return where the coordinator can be reached; wait for one as long as for any service."""
    if stack.coordinator.attach is not None:
        return stack.coordinator.attach
    try:
        async with asyncio.timeout(stack.ready_timeout_s), aclosing(registry.watch()) as views:
            async for view in views:
                found = [
                    one
                    for one in view.values()
                    if one.kind == reg.SERVICE_KIND_COORDINATOR and one.state in _ALIVE
                ]
                if found:
                    return max(found, key=lambda one: one.started_at.ToNanoseconds()).address
    except TimeoutError:
        pass
    raise Unavailable(
        "there is no coordinator to fetch files from",
        where=f"stack {stack.name!r}",
        why=f"none is in the registry for {stack.ready_timeout_s:g} s",
        next_step="start the coordinator, or name its address in coordinator.attach",
    )
