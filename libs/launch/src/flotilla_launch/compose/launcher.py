"""The launcher of containers on this host: has Docker Compose start those of a stack, watches, scales and ends them.

Invariants: one command at a time works on a stack; containers are found by the name of their project, which holds the
mark of the placement, so none is forgotten when a command dies; `placed.json` exists from before the first container
until after the last one; a first start comes up whole or leaves no container. Docker starts a service that dies again,
within `restart_budget`; what a container is, Docker says, and whether it is READY, the service in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.bus.connection import OWN_FILES, SERVICE
from flotilla_core.bus.server import MAY_PUBLISH, server_config
from flotilla_core.config import StackConfig, dump_yaml, load
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.kinds import kind_name
from flotilla_core.subprocess_group import outputs
from flotilla_core.trust import TokenFile, make_token
from flotilla_launch import local
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
from flotilla_launch.environment import resolved
from flotilla_launch.gpus import Gpus
from flotilla_launch.health import is_serving
from flotilla_launch.logs import failure_excerpt
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import (
    changed_replicas,
    check_scalable,
    difference,
    wanted_replicas,
)
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import NATS, Placed, Row

_LOOK_EVERY_S = 1.0
_TOOL_LIMIT_S = 60.0
_COMPOSE_LIMIT_S = 300.0
_SECRET_FILES = (Path("token"), OWN_FILES[SERVICE])
_READY = pb.ProcessState.PROCESS_STATE_READY
_ENDED = (pb.ProcessState.PROCESS_STATE_FAILED, pb.ProcessState.PROCESS_STATE_STOPPED)
Say = Callable[[str], None]


class ComposeLauncher:
    """Keeps one stack in containers."""

    name = "compose"

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths
        self._directory = paths.directory.resolve()

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        check(stack)
        stack = contained(stack, self._directory)
        await self._require_images(stack)
        self._paths.make()
        make_token(stack.bind, self._paths.directory)
        limit_s = stack.ready_timeout_s + _COMPOSE_LIMIT_S
        async with local.one_at_a_time(self._paths, limit_s, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is not None:
                changed = await self._completed(stack, placed, on_progress)
            else:
                await self._begun(stack, on_progress)
                changed = True
            return Placed(changed, list((await self.state()).processes))

    async def state(self) -> pb.ListResponse:
        placed = self._placed()
        stack = self._stack(placed)
        containers = await self._containers(placed)
        token = TokenFile.of_stack(stack.bind, self._paths.directory).current()
        rows = self._table(stack)
        processes = await asyncio.gather(
            *(self._process(row, containers.get(row.name), token) for row in rows)
        )
        nats = next(process.address for process in processes if process.name == NATS)
        return pb.ListResponse(
            stack=self._paths.directory.name, nats_url=f"nats://{nats}" if nats else "", processes=processes
        )

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        check_scalable(kind)
        async with local.one_at_a_time(self._paths, _COMPOSE_LIMIT_S, lambda _: None):
            placed = self._placed()
            placed = replace(placed, replicas={**placed.replicas, kind_name(kind): replicas})
            await self._adjust(placed, timeout_s, lambda _: None)
        return [process for process in (await self.state()).processes if process.kind == kind]

    async def down(self, *, on_wait: Say) -> bool:
        async with local.one_at_a_time(self._paths, _COMPOSE_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is None:
                return False
            await self._end(placed)
            return True

    async def _begun(self, stack: StackConfig, on_progress: local.Progress) -> None:
        """Start the whole stack and wait until it is up; end it where it does not come up."""
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        replicas = wanted_replicas(stack)
        placed = PlacedFile(self.name, secrets.token_hex(4), replicas, executables="")
        async with AsyncExitStack() as unless_up:
            unless_up.push_async_callback(self._end, placed)
            self._write_login()
            await self._adjust(placed, stack.ready_timeout_s, on_progress)
            unless_up.pop_all()

    async def _completed(self, stack: StackConfig, placed: PlacedFile, on_progress: local.Progress) -> bool:
        """Start what a running stack has lost, and follow changed numbers of replicas."""
        running = load(StackConfig, [self._paths.stack_file])
        if differing := difference(running, stack):
            raise FailedPrecondition(
                f"stack {stack.name!r} already runs with another configuration",
                where=str(self._paths.directory),
                why="\n  " + "\n  ".join(differing) + "\n",
                next_step="run `flotilla down` first, or give the new stack another name",
            )
        changed = changed_replicas(running, stack)
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        wanted = replace(placed, replicas={**placed.replicas, **changed})
        lost = any(process.state != _READY for process in (await self.state()).processes)
        await self._adjust(wanted, stack.ready_timeout_s, on_progress)
        return bool(changed) or lost

    async def _adjust(self, placed: PlacedFile, timeout_s: float, on_progress: local.Progress) -> None:
        """Make the containers equal to what is wanted; those that run already stay as they are."""
        stack = self._stack(placed)
        rows = self._table(stack)
        Gpus.of_host().require(stack, stack.generator.replicas)
        values = {
            name: resolved(row.environment, row.name)[key] for name, (row, key) in secrets_of(rows).items()
        }
        self._furnish(stack, rows, placed)
        placed.write(self._paths.placed_file)
        await self._compose(placed, "up", "--detach", "--no-recreate", "--remove-orphans", variables=values)
        await self._until_up(timeout_s, on_progress)

    async def _until_up(self, timeout_s: float, on_progress: local.Progress) -> None:
        """Wait until every container is READY; raise why one will not be."""
        deadline = time.monotonic() + timeout_s
        while True:
            processes = list((await self.state()).processes)
            on_progress(processes)
            if all(process.state == _READY for process in processes):
                return
            late = time.monotonic() > deadline
            for process in processes:
                if process.state in _ENDED or (late and process.state != _READY):
                    raise (DeadlineExceeded if late else FailedPrecondition)(
                        f"{process.name} did not start",
                        where=f"stack {self._paths.directory.name!r} in containers",
                        why=process.error or f"it was not ready within {timeout_s:.0f} s",
                        next_step=f"read {process.log_path}",
                    )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _end(self, placed: PlacedFile) -> None:
        """End all containers in order, NATS last; then the files of the placement."""
        if self._compose_file.exists():
            await self._compose(placed, "down", "--volumes", "--remove-orphans")
        if left := await self._containers(placed):
            await _docker("rm", "--force", *(one["Id"] for one in left.values()))
        for announced in self._directory.glob("**/instances/*.json"):
            announced.unlink(missing_ok=True)
        for file in (self._compose_file, self._paths.placed_file):
            file.unlink(missing_ok=True)

    async def _process(self, row: Row, container: Mapping[str, Any] | None, token: str) -> pb.ProcessStatus:
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
            if await (_listens(host) if row.name == NATS else is_serving(status.address, token)):
                status.state = _READY
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

    def _write_login(self) -> None:
        """Make the passwords of NATS, for the life of this placement."""
        passwords = {user: secrets.token_hex(32) for user in MAY_PUBLISH}
        folder = Project(self._directory, "", "").home(NATS) / NATS
        for made in (folder, self._paths.nats):
            make_private_folder(made)
        # Inside the container the folder is that of the stack.
        config = server_config(self._directory / NATS, "0.0.0.0", NATS_PORT, passwords, None)
        write_atomically(folder / "nats.conf", config)
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
            if row.name != NATS:
                for name in (*_SECRET_FILES, Path("stack.yaml")):
                    if (source := self._directory / name).exists():
                        write_atomically(home / name, source.read_text("utf-8"))
        write_atomically(self._compose_file, render(stack, rows, project))

    @property
    def _compose_file(self) -> Path:
        return self._directory / "compose.yaml"

    def _project(self, placed: PlacedFile) -> Project:
        return Project(self._directory, placed.mark, this_user())

    def _table(self, stack: StackConfig) -> list[Row]:
        return container_table(stack, Gpus.of_host(), self._directory)

    def _stack(self, placed: PlacedFile) -> StackConfig:
        return placed.scaled(load(StackConfig, [self._paths.stack_file]))

    def _placed(self) -> PlacedFile:
        return PlacedFile.required(self._paths.placed_file, "compose")


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
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
        )
    except OSError as error:
        raise FailedPrecondition(
            "Docker cannot be run",
            where=command[0],
            why=str(error.strerror),
            next_step="install Docker and Docker Compose (Debian: docker.io and docker-compose), or start the stack "
            "without containers: flotilla up --on local",
        ) from None
    try:
        out, err = await asyncio.wait_for(outputs(process), limit_s)
    except TimeoutError:
        process.kill()
        raise Unavailable(
            f"{command[0]} does not answer", why=f"nothing within {limit_s:.0f} s", next_step="try again"
        ) from None
    if process.returncode and check:
        raise FailedPrecondition(
            f"{command[0]} refuses",
            where=" ".join(command),
            why=err.decode(errors="replace").strip(),
            next_step="see whether its engine runs and you may use it: docker info",
        )
    return out.decode(errors="replace")
