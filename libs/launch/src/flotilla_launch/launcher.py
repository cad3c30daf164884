"""The contract of launchers, the local one behind it, and which of them has a stack.

Invariant: the state directory remembers the launcher of a stack, so `up` alone is told which; a stack has one at most.
`docs/design/launchers.md` explains the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.config import StackConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.trust import Credential
from flotilla_launch import local
from flotilla_launch.client import LauncherClient, require
from flotilla_launch.cluster import Cluster
from flotilla_launch.compose.engine import ComposeEngine
from flotilla_launch.gpus import Gpus
from flotilla_launch.guardian import starts_launcher_again
from flotilla_launch.kubernetes.engine import KubernetesEngine
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import Engine, PlacedStack, Say
from flotilla_launch.ray.scheduler import RayScheduler
from flotilla_launch.slurm.scheduler import SlurmScheduler
from flotilla_launch.state import PlacedFile, is_up
from flotilla_launch.table import Placed, Row, ThisHost, agent_rows, table_of

LOCAL, COMPOSE, KUBERNETES, ATTACHED = "local", "compose", "kubernetes", "attached"
ENGINES: dict[str, Callable[[StackPaths], Engine]] = {
    COMPOSE: ComposeEngine,
    "slurm": lambda paths: Cluster(paths, SlurmScheduler(paths)),
    "ray": lambda paths: Cluster(paths, RayScheduler(paths)),
    KUBERNETES: KubernetesEngine,
}
LAUNCHERS = (LOCAL, *ENGINES)
ON_THIS_HOST = (LOCAL, COMPOSE)


class Launcher(Protocol):
    """Places stacks with one engine."""

    name: str

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        """Start what is missing of the stack's table; return when every row is READY.

        A first start that fails or is interrupted leaves nothing.
        """

    async def state(self) -> pb.ListResponse:
        """Return every slot with its state; raise Unavailable where this launcher has no stack."""

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        """Return the replicas of the kind when new ones are READY and surplus ones are gone."""

    async def down(self, *, on_wait: Say) -> bool:
        """End everything in order; return whether anything was there."""


class LocalLauncher:
    """The launcher of this host, behind its unix socket."""

    name = LOCAL

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        result = await local.up(stack, on_progress=on_progress, on_wait=on_wait, on_tightened=on_wait)
        return Placed(result.changed, result.processes)

    async def state(self) -> pb.ListResponse:
        async with LauncherClient.open(require(self._paths)) as launcher:
            return await launcher.state()

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        async with LauncherClient.open(require(self._paths)) as launcher:
            return await launcher.scale(kind, replicas, timeout_s=timeout_s)

    async def restart(self, name: str, executables: Path, *, timeout_s: float) -> pb.ProcessStatus:
        """Return the replica when it was started again from the commands of another environment."""
        async with LauncherClient.open(require(self._paths)) as launcher:
            return await launcher.restart(name, executables, timeout_s=timeout_s)

    async def down(self, *, on_wait: Say) -> bool:
        return await local.down(self._paths, on_wait=on_wait)


class AttachedLauncher:
    """The launcher of another host, behind the port that `launcher.attach` names."""

    name = ATTACHED

    def __init__(self, address: str, credential: Credential) -> None:
        self._address = address
        self._credential = credential

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        raise FailedPrecondition(
            f"stack {stack.name!r} is placed by the launcher of another machine",
            where=f"launcher.attach {self._address}",
            next_step="run flotilla up on that machine, or leave launcher.attach out to start the stack here",
        )

    async def state(self) -> pb.ListResponse:
        async with LauncherClient.at(self._address, self._credential) as launcher:
            return await launcher.state()

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        async with LauncherClient.at(self._address, self._credential) as launcher:
            return await launcher.scale(kind, replicas, timeout_s=timeout_s)

    async def down(self, *, on_wait: Say) -> bool:
        async with LauncherClient.at(self._address, self._credential) as launcher:
            await launcher.stop()
        return True


def launcher_of(paths: StackPaths) -> Launcher:
    """Return the launcher that has the stack; the local one where none has it."""
    placed = PlacedFile.read(paths.placed_file)
    return _launcher(placed.launcher if placed is not None else LOCAL, paths)


def launcher_for(name: str | None, paths: StackPaths) -> Launcher:
    """Return the launcher that `up` was told; raise FailedPrecondition where another one has the stack."""
    has_it = launcher_of(paths)
    if name is None or name == has_it.name:
        return has_it
    if is_up(paths) or starts_launcher_again(paths):
        raise FailedPrecondition(
            f"stack {paths.directory.name!r} is up on {has_it.name}",
            where=str(paths.directory),
            why=f"a stack has one launcher, and this one was to be placed on {name}",
            next_step="run flotilla down first, or give the new stack another name",
        )
    return _launcher(name, paths)


def planned(stack: StackConfig, name: str, executables: Path | None = None) -> list[Row]:
    """Return the table that the launcher of this name would place, then what a user starts on other hosts.

    Refuse what the launcher would refuse.
    """
    paths = StackPaths.of(stack.state_dir, stack.name)
    executables = executables or local.executables_directory()
    if name in ENGINES:
        return ENGINES[name](paths).plan(stack, executables)
    gpus = Gpus.of_host()
    gpus.require(stack, stack.generator.replicas)
    rows = table_of(stack, ThisHost(gpus), directory=paths.directory, executables=executables)
    return [*rows, *agent_rows(stack, directory=paths.directory, executables=executables)]


def _launcher(name: str, paths: StackPaths) -> Launcher:
    return PlacedStack(paths, ENGINES[name](paths)) if name in ENGINES else LocalLauncher(paths)
