"""The engine of containers on this host: has Docker Compose start those of a stack, and end them.

Invariants: containers are found by the name of their project, which holds the mark of the placement. Docker starts a
service that dies again, within `restart_budget`; what a container is, Docker says, and whether it is READY, the service
in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.bus.connection import OWN_FILES, SERVICE
from flotilla_core.bus.server import MAY_PUBLISH, server_config, write_authorities
from flotilla_core.config import StackConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.trust import Credential
from flotilla_launch.compose.file import (
    COORDINATOR,
    NATS_PORT,
    Project,
    check,
    contained,
    container_table,
    images_of,
    render,
    secrets_of,
    this_user,
)
from flotilla_launch.engine_commands import outcome, refused
from flotilla_launch.environment import resolved
from flotilla_launch.gpus import Gpus
from flotilla_launch.health import is_serving
from flotilla_launch.logs import failure_excerpt
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import READY, Say, Seen, troubles_of
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import NATS, Row

_LOOK_EVERY_S = 1.0
_TOOL_LIMIT_S = 60.0
_COMPOSE_LIMIT_S = 300.0
_MISSING = (
    "install Docker and Docker Compose (Debian: docker.io and docker-compose), or start the stack without containers: "
    "flotilla up --on local"
)
_ENDED = (pb.ProcessState.PROCESS_STATE_FAILED, pb.ProcessState.PROCESS_STATE_STOPPED)


class ComposeEngine:
    """Runs a stack in containers of this host."""

    name = "compose"
    listing = "docker ps"
    look_every_s = _LOOK_EVERY_S
    queue_limit_s = 0.0
    changes_in_place = False

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths
        self._directory = paths.directory.resolve()

    def plan(self, stack: StackConfig, executables: Path) -> list[Row]:
        check(stack)
        Gpus.of_host().require(stack, stack.generator.replicas)
        return self._table(contained(stack, self._directory))

    async def accept(self, stack: StackConfig, placed: PlacedFile | None) -> StackConfig:
        check(stack)
        stack = contained(stack, self._directory)
        await self._require_images(stack)
        return stack

    async def begin(self, stack: StackConfig, placed: PlacedFile) -> PlacedFile:
        self._write_login(Credential.of_stack(stack.bind, self._directory))
        return placed

    async def follow(
        self, stack: StackConfig, placed: PlacedFile, say: Say, scaled: ServiceKind.ValueType | None
    ) -> bool:
        """Start the containers that are missing; those that run already stay as they are."""
        rows = self._table(stack)
        Gpus.of_host().require(stack, stack.generator.replicas)
        values = {
            name: resolved(row.environment, row.name)[key] for name, (row, key) in secrets_of(rows).items()
        }
        lost = any(process.state != READY for process in (await self.look(stack, placed)).processes)
        self._furnish(stack, rows, placed)
        placed.write(self._paths.placed_file)
        await self._compose(placed, "up", "--detach", "--no-recreate", "--remove-orphans", variables=values)
        return lost

    async def look(self, stack: StackConfig, placed: PlacedFile) -> Seen:
        containers = await self._containers(placed)
        credential = Credential.of_stack(stack.bind, self._directory)
        processes = await asyncio.gather(
            *(self._process(row, containers.get(row.name), credential) for row in self._table(stack))
        )
        nats = next(process.address for process in processes if process.name == NATS)
        return Seen(processes, nats_url=f"tls://{nats}" if nats else "", troubles=troubles_of(processes))

    async def end(self, placed: PlacedFile, say: Say) -> None:
        """End all containers in order, NATS last."""
        if self._compose_file.exists():
            await self._compose(placed, "down", "--volumes", "--remove-orphans")
        if left := await self._containers(placed):
            await _docker("rm", "--force", *(one["Id"] for one in left.values()))
        for announced in self._directory.glob("**/instances/*.json"):
            announced.unlink(missing_ok=True)
        self._compose_file.unlink(missing_ok=True)

    async def _process(
        self, row: Row, container: Mapping[str, Any] | None, credential: Credential
    ) -> pb.ProcessStatus:
        """Return what Docker says of a container, and READY where the service in it says so."""
        log = self._paths.log_file(row.name)
        status = pb.ProcessStatus(name=row.name, kind=row.slot.kind, log_path=str(log))
        status.since.GetCurrentTime()
        if container is None:
            status.state = pb.ProcessState.PROCESS_STATE_STOPPED
            status.error = "its container is gone; flotilla up starts it again"
            return status
        told = container["State"]
        status.restarts = container["RestartCount"]
        if told["Status"] in ("exited", "dead"):
            code = told["ExitCode"]
            status.state = _ENDED[0] if code else _ENDED[1]
            why = failure_excerpt(log)[0] if code else ""
            status.error = (
                f"it ended with status {code}{f': {why}' if why else ''}; flotilla up starts it again"
            )
            return status
        status.since.FromJsonString(told["StartedAt"])
        status.pid = told["Pid"]
        restarting = told["Status"] == "restarting"
        status.state = getattr(pb.ProcessState, f"PROCESS_STATE_{'RESTARTING' if restarting else 'STARTING'}")
        networks = container["NetworkSettings"]["Networks"].values()
        host = next((network["IPAddress"] for network in networks if network["IPAddress"]), "")
        if host and not restarting:
            status.address = f"{host}:{row.resources.ports[0]}"
            if await (_listens(host) if row.name == NATS else is_serving(status.address, credential)):
                status.state = READY
        return status

    async def _containers(self, placed: PlacedFile) -> dict[str, dict[str, Any]]:
        """Return what Docker knows of each container of the placement, by its service."""
        label = f"label=com.docker.compose.project={self._project(placed).name}"
        ids = (await _docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label)).split()
        # One that has gone meanwhile is an error that leaves the others in the answer.
        told = json.loads(await _docker("inspect", "--type", "container", *ids, check=False)) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in told}

    async def _compose(self, placed: PlacedFile, *arguments: str, variables: Mapping[str, str] = {}) -> None:
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        project = ["--project-name", self._project(placed).name, "--file", str(self._compose_file)]
        environment = {"COMPOSE_HTTP_TIMEOUT": f"{_COMPOSE_LIMIT_S:.0f}", **os.environ, **variables}
        await _run([*command, *project, *arguments], _COMPOSE_LIMIT_S, environment)

    async def _require_images(self, stack: StackConfig) -> None:
        images = images_of(stack, self._table(stack))
        listed = (await _docker("images", "--format", "{{.Repository}}:{{.Tag}}")).splitlines()
        if missing := sorted(images - set(listed)):
            raise FailedPrecondition(
                f"image {missing[0]} is not here",
                where="docker images",
                why=f"the stack runs {', '.join(sorted(images))}",
                next_step="build the images of this version (make images), or name theirs in compose.tag",
            )

    def _write_login(self, credential: Credential) -> None:
        """Make the passwords of NATS, for the life of this placement."""
        passwords = {user: secrets.token_hex(32) for user in MAY_PUBLISH}
        folder = Project(self._directory, "", "").home(NATS) / NATS
        for made in (folder, self._paths.nats):
            make_private_folder(made)
        # Inside the container the folder is that of the stack.
        config = server_config(self._directory / NATS, "0.0.0.0", NATS_PORT, passwords, credential)
        write_atomically(folder / "nats.conf", config)
        write_authorities(folder, credential)
        for user, password in passwords.items():
            write_atomically(self._directory / OWN_FILES[user], f"{user}:{password}\n")

    def _furnish(self, stack: StackConfig, rows: Sequence[Row], placed: PlacedFile) -> None:
        """Write the Compose file, and give each container what it reads: the stack file and copies of secrets."""
        project = self._project(placed)
        for row in rows:
            home = project.home(row.name)
            for folder in (home, home / "logs", home / "instances", home / NATS):
                make_private_folder(folder)
            if row.name == COORDINATOR:
                continue
            log = self._paths.log_file(row.name)
            if not log.exists():
                log.unlink(missing_ok=True)
                log.symlink_to(home / "logs" / log.name)
            files = [Path(self._paths.credential_file.name)]
            files += [OWN_FILES[SERVICE], Path(self._paths.stack_file.name)] if row.name != NATS else []
            for file in files:
                if (source := self._directory / file).exists():
                    write_atomically(home / file, source.read_text("utf-8"))
        write_atomically(self._compose_file, render(stack, rows, project))

    @property
    def _compose_file(self) -> Path:
        return self._directory / "compose.yaml"

    def _project(self, placed: PlacedFile) -> Project:
        return Project(self._directory, placed.mark, this_user())

    def _table(self, stack: StackConfig) -> list[Row]:
        return container_table(stack, Gpus.of_host(), self._directory)


async def _listens(host: str) -> bool:
    try:
        async with asyncio.timeout(_LOOK_EVERY_S):
            _, writer = await asyncio.open_connection(host, NATS_PORT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _docker(*arguments: str, check: bool = True) -> str:
    return await _run(["docker", *arguments], _TOOL_LIMIT_S, dict(os.environ), check=check)


async def _run(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], *, check: bool = True
) -> str:
    """Run a command of Docker; return what it prints."""
    status, out, err = await outcome(command, limit_s, _MISSING, environment)
    if status and check:
        raise refused(command, err, "see whether its engine runs and you may use it: docker info")
    return out
