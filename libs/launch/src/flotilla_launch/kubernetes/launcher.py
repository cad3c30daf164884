"""The launcher of Kubernetes: has Helm install the chart for a stack, watches its pods, scales and removes it.

Invariants: one command at a time works on a stack; `placed.json` exists from before the release until after it, and the
stack file beside it names context and namespace, so every later command asks the cluster of `up`; a first start comes
up whole or leaves no release; Kubernetes keeps the pods up, and what they are, it says. The claims of runs and ledger
outlive the release. No address of a pod is told: this host need not reach one, and commands for the coordinator run
beside it (`PlacedFile.reach`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1.run_pb2 import Run, RunState
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.config import StackConfig, dump_yaml, load
from flotilla_core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
)
from flotilla_core.files import write_atomically
from flotilla_core.kinds import kind_name
from flotilla_core.trust import make_token
from flotilla_launch import local
from flotilla_launch.kubernetes.commands import Cluster, current_context
from flotilla_launch.kubernetes.pods import (
    Object,
    pods_by_name,
    processes_of,
    rolling,
    stages_of,
    troubles,
)
from flotilla_launch.kubernetes.table import Release, rows_of
from flotilla_launch.kubernetes.values import CHART, Values, Words, check, given_values, values_of
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import (
    changed_replicas,
    check_scalable,
    wanted_replicas,
)
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import Placed

_LOOK_EVERY_S = 2.0
_LOCK_LIMIT_S = 600.0
_PATIENCE_S = 30.0
"""An image that cannot be pulled once may be there the next time."""
_READY = pb.ProcessState.PROCESS_STATE_READY
Say = Callable[[str], None]


@dataclass(frozen=True)
class PodLog:
    """The log of one service, as Kubernetes keeps it."""

    name: str
    pod: str
    cluster: Cluster

    def tail(self, lines: int, *, follow: bool) -> AsyncGenerator[str]:
        """Give its last lines, then new ones while `follow` is set."""
        more = ["--follow"] if follow else []
        return self.cluster.lines("logs", self.pod, f"--tail={lines}", *more)


class KubernetesLauncher:
    """Keeps one stack as a release of the chart."""

    name = "kubernetes"

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        check(stack)
        given_values(stack)  # A file that is wrong is said before a cluster is asked.
        placed = PlacedFile.read(self._paths.placed_file)
        stack = await self._at_a_cluster(stack, placed)
        cluster = _cluster(stack)
        await self._objects(
            stack
        )  # A cluster that does not answer, or not to this user, is said before all else.
        if placed is None and await cluster.release(stack.name) is not None:
            raise FailedPrecondition(
                f"there is a release {stack.name!r} that this host did not place",
                where=f"namespace {cluster.namespace}",
                next_step="give the stack another name or namespace, or remove the release: helm uninstall",
            )
        self._paths.make()
        async with local.one_at_a_time(self._paths, _LOCK_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is None:
                changed = await self._begun(stack, on_progress)
            else:
                changed = await self._completed(stack, placed, on_progress, on_wait)
            return Placed(changed, list((await self.state()).processes))

    async def state(self) -> pb.ListResponse:
        stack, release = self._placement()
        objects = await self._objects(stack)
        return pb.ListResponse(
            stack=stack.name,
            nats_url=release.nats_url,
            processes=await self._processes(stack, release, objects),
        )

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        check_scalable(kind)
        async with local.one_at_a_time(self._paths, _LOCK_LIMIT_S, lambda _: None):
            stack, release = self._placement()
            if kind == ServiceKind.SERVICE_KIND_GENERATOR and release.scaled_by:
                raise FailedPrecondition(
                    f"{release.scaled_by} scales the generators of this stack",
                    where="generator.autoscaling.kind",
                    why="it would undo the change",
                    next_step="change minReplicas and maxReplicas in the values, then flotilla up",
                )
            placed = self._placed()
            name = kind_name(kind)
            replace(placed, replicas={**placed.replicas, name: replicas}).write(self._paths.placed_file)
            values = self._written_values()
            values["stack"][name]["replicas"] = replicas
            self._write_values(values)
            await _cluster(stack).kubectl("scale", release.workload(kind), f"--replicas={replicas}")
            await self._until_up(timeout_s, lambda _: None)
        return [process for process in (await self.state()).processes if process.kind == kind]

    async def down(self, *, on_wait: Say) -> bool:
        async with local.one_at_a_time(self._paths, _LOCK_LIMIT_S, on_wait):
            if PlacedFile.read(self._paths.placed_file) is None:
                return False
            await self._end(on_wait)
            return True

    async def logs(self) -> dict[str, PodLog]:
        """Return the log of each service that has a pod."""
        stack, _ = self._placement()
        found = pods_by_name(await self._objects(stack))
        return {name: PodLog(name, pod, _cluster(stack)) for name, pod in found.items()}

    async def runs(self) -> list[Run]:
        """Return the runs that the coordinator knows, as the command beside it lists them."""
        stack, release = self._placement()
        command = ["exec", release.coordinator_pod, "--", "flotilla", "run", "list", "--json"]
        listed = json.loads(await _cluster(stack).kubectl(*command))["runs"]
        return [
            Run(
                run_id=run["run_id"],
                step=run["step"],
                state=RunState.Value(f"RUN_STATE_{run['state'].upper()}"),
            )
            for run in listed
        ]

    async def _at_a_cluster(self, stack: StackConfig, placed: PlacedFile | None) -> StackConfig:
        """Return the stack with the context that it stays with; refuse another one for a stack that is placed."""
        wanted = stack.kubernetes
        if placed is None:
            context: str | None = wanted.context or await current_context()
        else:
            running = load(StackConfig, [self._paths.stack_file]).kubernetes
            context = running.context
            if wanted.namespace != running.namespace or wanted.context not in (None, context):
                raise FailedPrecondition(
                    f"stack {stack.name!r} is up in namespace {running.namespace} of {context}",
                    where=str(self._paths.directory),
                    next_step="run flotilla down first, or give the new stack another name",
                )
        return stack.model_copy(update={"kubernetes": wanted.model_copy(update={"context": context})})

    async def _begun(self, stack: StackConfig, on_progress: local.Progress) -> bool:
        """Install the release and wait until it is up; remove it where it does not come up."""
        values = values_of(stack, given_values(stack), self._words(stack))
        release = Release.of(stack, values)
        replicas = wanted_replicas(stack)
        reach = _cluster(stack).kubectl_command("exec", "-i", release.coordinator_pod, "--", "flotilla")
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        placed = PlacedFile(
            self.name, secrets.token_hex(4), replicas, executables="", reach=shlex.join(reach)
        )
        placed.write(self._paths.placed_file)
        async with AsyncExitStack() as unless_up:
            unless_up.push_async_callback(self._end, lambda _: None)
            await self._install(stack, values)
            await self._until_up(stack.ready_timeout_s, on_progress)
            unless_up.pop_all()
        return True

    async def _completed(
        self, stack: StackConfig, placed: PlacedFile, on_progress: local.Progress, on_wait: Say
    ) -> bool:
        """Have Helm bring the release to what stack file, values and chart say now, and wait until it is up."""
        running = load(StackConfig, [self._paths.stack_file])
        changed = changed_replicas(running, stack)
        placed = replace(placed, replicas={**placed.replicas, **changed})
        values = values_of(placed.scaled(stack), given_values(stack), self._words(stack))
        lost = any(process.state != _READY for process in (await self.state()).processes)
        differs = values != self._written_values() or await self._is_of_another_chart(stack)
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        placed.write(self._paths.placed_file)
        if differs or lost:
            if differs:
                on_wait(
                    "the release changes: Kubernetes replaces the pods that differ, one by one in each workload"
                )
            await self._install(stack, values)
        await self._until_up(stack.ready_timeout_s, on_progress)
        return differs or lost

    async def _install(self, stack: StackConfig, values: Values) -> None:
        """Have Helm install or upgrade the release; return when Kubernetes has its objects."""
        self._write_values(values)
        await _cluster(stack).helm(
            "upgrade", "--install", stack.name, str(CHART), "--values", str(self._values_file)
        )

    async def _until_up(self, timeout_s: float, on_progress: local.Progress) -> None:
        """Wait until the pods are those that are wanted, and READY; raise why they will not be.

        A pod has `timeout_s` for each step: to get a node, its image and volumes, and to become ready.
        """
        stack, release = self._placement()
        reached: dict[str, int] = {}
        since: dict[str, float] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            objects = await self._objects(stack)
            processes = await self._processes(stack, release, objects)
            on_progress(processes)
            behind = rolling(objects)
            if not behind and all(process.state == _READY for process in processes):
                return
            now = time.monotonic()
            for pod, stage in stages_of(objects).items():
                if stage > reached.get(pod, -1):
                    reached[pod], deadline = stage, now + timeout_s
            found = {trouble.name: trouble for trouble in troubles(objects, processes, stack.restart_budget)}
            since = {name: since.get(name, now) for name in found}
            for name, trouble in found.items():
                if now - since[name] >= _PATIENCE_S:
                    raise FailedPrecondition(
                        f"{name} did not start",
                        where=_place(stack),
                        why=trouble.why,
                        next_step=trouble.next_step,
                    )
            if now > deadline:
                raise _late(stack, processes, behind, timeout_s)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _end(self, on_wait: Say) -> None:
        """Have Helm remove the release, and wait for its pods; then the files of the placement."""
        stack, release = self._placement()
        cluster = _cluster(stack)
        if await cluster.release(stack.name) is not None:
            grace_s = max(
                int(release.values[kind]["drainSeconds"]) for kind in ("generator", "trainer", "nats")
            )
            on_wait(f"services finish what they have, for at most {grace_s} s")
            # Helm's own wait differs between its versions; ours ends with the last pod.
            await cluster.helm("uninstall", stack.name)
            await self._until_gone(stack, grace_s + stack.ready_timeout_s)
            claims = cluster.kubectl_command("delete", "pvc", "--selector", _selector(stack))
            on_wait(f"runs, ledger and registry stay on their claims; to delete them: {shlex.join(claims)}")
        for file in (self._values_file, self._paths.placed_file):
            file.unlink(missing_ok=True)

    async def _until_gone(self, stack: StackConfig, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := pods_by_name(await self._objects(stack)):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{', '.join(left)} did not end",
                    where=_place(stack),
                    why=f"still there after {timeout_s:.0f} s",
                    next_step="see whether their nodes answer: kubectl get pods -o wide; then flotilla down again",
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _objects(self, stack: StackConfig) -> list[dict[str, Any]]:
        return await _cluster(stack).get(
            "pods,deployments.apps,statefulsets.apps", "--selector", _selector(stack)
        )

    async def _processes(
        self, stack: StackConfig, release: Release, objects: list[dict[str, Any]]
    ) -> list[pb.ProcessStatus]:
        """Return the list; events are asked for only where something is not READY."""
        rows = rows_of(stack, release)
        found = processes_of(objects, (), rows, release)
        if all(process.state == _READY for process in found):
            return found
        events: list[Object] = list(await _cluster(stack).get("events", "--field-selector", "type=Warning"))
        return processes_of(objects, events, rows, release)

    async def _is_of_another_chart(self, stack: StackConfig) -> bool:
        """Return whether the release is of another version of the chart, or gone, or was not brought to its end."""
        found = await _cluster(stack).release(stack.name) or {}
        version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["version"]
        return (found.get("version"), found.get("status")) != (version, "deployed")

    def _words(self, stack: StackConfig) -> Words:
        """Return the secrets of the stack: the token of its directory, and those that its values have or get now."""
        auth = self._written_values().get("auth", {})
        return Words(
            token=make_token(stack.bind, self._paths.directory),
            nats=auth.get("natsPassword") or secrets.token_hex(32),
            nats_coordinator=auth.get("natsCoordinatorPassword") or secrets.token_hex(32),
            routes=auth.get("natsRoutePassword") or secrets.token_hex(32),
        )

    def _written_values(self) -> Values:
        """Return the values of the last command; none before the first one."""
        try:
            found: Values = yaml.safe_load(self._values_file.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return found

    def _write_values(self, values: Values) -> None:
        write_atomically(self._values_file, yaml.safe_dump(values, sort_keys=False))

    @property
    def _values_file(self) -> Path:
        return self._paths.directory / "values.yaml"

    def _placement(self) -> tuple[StackConfig, Release]:
        """Return the stack that is wanted now, and the release that it is."""
        stack = self._placed().scaled(load(StackConfig, [self._paths.stack_file]))
        return stack, Release.of(stack, self._written_values() or values_of(stack, given_values(stack), None))

    def _placed(self) -> PlacedFile:
        return PlacedFile.required(self._paths.placed_file, "kubernetes")


def _cluster(stack: StackConfig) -> Cluster:
    return Cluster(stack.kubernetes.context, stack.kubernetes.namespace)


def _selector(stack: StackConfig) -> str:
    return f"app.kubernetes.io/instance={stack.name}"


def _place(stack: StackConfig) -> str:
    return f"namespace {stack.kubernetes.namespace}, context {stack.kubernetes.context}"


def _late(
    stack: StackConfig, processes: list[pb.ProcessStatus], behind: list[str], timeout_s: float
) -> FlotillaError:
    """Return the error about what is not up in time, with what Kubernetes says of it."""
    slow = [process for process in processes if process.state != _READY]
    what = slow[0].name if slow else behind[0]
    why = (slow[0].error if slow else "") or f"it made no step for {timeout_s:.0f} s"
    next_step = f"read its log (flotilla logs {what}), or raise ready_timeout_s"
    if "Insufficient" in why:
        next_step = (
            "add nodes, or ask for less: replicas and nproc of the stack file, resources of the values"
        )
    return DeadlineExceeded(f"{what} did not start", where=_place(stack), why=why, next_step=next_step)
