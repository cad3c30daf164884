"""The engine of Kubernetes: has Helm install the chart for a stack, scales its workloads and removes it.

Invariants: the stack file beside `placed.json` names context and namespace, so every later command asks the cluster of
`up`; Kubernetes keeps the pods up, and what they are, it says. The claims of runs and ledger outlive the release. No
address of a pod is told: this host need not reach one, and commands for the coordinator run beside it
(`PlacedFile.reach`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1.run_pb2 import Run, RunState
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.config import StackConfig, load
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition
from flotilla_core.files import write_atomically
from flotilla_core.kinds import kind_name
from flotilla_core.trust import read_secret
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
from flotilla_launch.placed_stack import READY, Say, Seen
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import Row


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


class KubernetesEngine:
    """Runs a stack as a release of the chart."""

    name = "kubernetes"
    listing = "kubectl get pods"
    look_every_s = 2.0
    queue_limit_s = 0.0
    changes_in_place = True

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths

    def plan(self, stack: StackConfig, executables: Path) -> list[Row]:
        check(stack)
        return rows_of(stack, Release.of(stack, values_of(stack, given_values(stack), None)))

    async def accept(self, stack: StackConfig, placed: PlacedFile | None) -> StackConfig:
        """Return the stack with the context that it stays with; refuse one that is up elsewhere, or not ours."""
        check(stack)
        given_values(stack)  # A file that is wrong is said before a cluster is asked.
        stack = await self._at_a_cluster(stack, placed)
        cluster = _cluster(stack)
        # A cluster that does not answer, or not to this user, is said before all else.
        await self._objects(stack)
        if placed is None and await cluster.release(stack.name) is not None:
            raise FailedPrecondition(
                f"there is a release {stack.name!r} that this host did not place",
                where=f"namespace {cluster.namespace}",
                next_step="give the stack another name or namespace, or remove the release: helm uninstall",
            )
        return stack

    async def begin(self, stack: StackConfig, placed: PlacedFile) -> PlacedFile:
        pod = self._release(stack).coordinator_pod
        reach = _cluster(stack).kubectl_command("exec", "-i", pod, "--", "flotilla")
        return replace(placed, reach=shlex.join(reach))

    async def follow(
        self, stack: StackConfig, placed: PlacedFile, say: Say, scaled: ServiceKind.ValueType | None
    ) -> bool:
        """Have Helm bring the release to what stack file, values and chart say now."""
        if scaled is not None:
            await self._scale(stack, placed, scaled)
            return True
        values, written = values_of(stack, given_values(stack), self._words(stack)), self._written_values()
        differs = values != written or await self._is_of_another_chart(stack)
        placed.write(self._paths.placed_file)
        if not differs and all(one.state == READY for one in (await self.look(stack, placed)).processes):
            return False
        if differs and written:
            say("the release changes: Kubernetes replaces the pods that differ, one by one in each workload")
        self._write_values(values)
        await _cluster(stack).helm(
            "upgrade", "--install", stack.name, str(CHART), "--values", str(self._values_file)
        )
        return True

    async def look(self, stack: StackConfig, placed: PlacedFile) -> Seen:
        release = self._release(stack)
        objects = await self._objects(stack)
        processes = await self._processes(stack, release, objects)
        lacks = any("Insufficient" in process.error for process in processes)
        return Seen(
            processes,
            nats_url=release.nats_url,
            unsettled=rolling(objects),
            troubles=troubles(objects, processes, stack.restart_budget),
            steps=stages_of(objects),
            place=_place(stack),
            next_step="add nodes, or ask for less: replicas and nproc of the stack file, resources of the values"
            if lacks
            else "",
        )

    async def end(self, placed: PlacedFile, say: Say) -> None:
        """Have Helm remove the release, and wait for its pods."""
        stack = self._stack(placed)
        cluster = _cluster(stack)
        if await cluster.release(stack.name) is not None:
            values = self._release(stack).values
            grace_s = max(int(values[kind]["drainSeconds"]) for kind in ("generator", "trainer", "nats"))
            say(f"services finish what they have, for at most {grace_s} s")
            # Helm's own wait differs between its versions; ours ends with the last pod.
            await cluster.helm("uninstall", stack.name)
            await self._until_gone(stack, grace_s + stack.ready_timeout_s)
            claims = cluster.kubectl_command("delete", "pvc", "--selector", _selector(stack))
            say(f"runs, ledger and registry stay on their claims; to delete them: {shlex.join(claims)}")
        self._values_file.unlink(missing_ok=True)

    async def logs(self) -> dict[str, PodLog]:
        """Return the log of each service that has a pod."""
        stack = self._stack()
        found = pods_by_name(await self._objects(stack))
        return {name: PodLog(name, pod, _cluster(stack)) for name, pod in found.items()}

    async def runs(self) -> list[Run]:
        """Return the runs that the coordinator knows, as the command beside it lists them."""
        stack = self._stack()
        command = ["exec", self._release(stack).coordinator_pod, "--", "flotilla", "run", "list", "--json"]
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

    async def _scale(self, stack: StackConfig, placed: PlacedFile, kind: ServiceKind.ValueType) -> None:
        """Change the number of pods alone: Helm would bring those that run to another release of the chart, too."""
        release = self._release(stack)
        if kind == ServiceKind.SERVICE_KIND_GENERATOR and release.scaled_by:
            raise FailedPrecondition(
                f"{release.scaled_by} scales the generators of this stack",
                where="generator.autoscaling.kind",
                why="it would undo the change",
                next_step="change minReplicas and maxReplicas in the values, then flotilla up",
            )
        placed.write(self._paths.placed_file)
        name = kind_name(kind)
        values = self._written_values()
        values["stack"][name]["replicas"] = placed.replicas[name]
        self._write_values(values)
        await _cluster(stack).kubectl("scale", release.workload(kind), f"--replicas={placed.replicas[name]}")

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
            await asyncio.sleep(self.look_every_s)

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
        if all(process.state == READY for process in found):
            return found
        events: list[Object] = list(await _cluster(stack).get("events", "--field-selector", "type=Warning"))
        return processes_of(objects, events, rows, release)

    async def _is_of_another_chart(self, stack: StackConfig) -> bool:
        """Return whether the release is of another version of the chart, or gone, or was not brought to its end."""
        found = await _cluster(stack).release(stack.name) or {}
        version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["version"]
        return (found.get("version"), found.get("status")) != (version, "deployed")

    def _words(self, stack: StackConfig) -> Words:
        """Return the secrets of the stack: its credential, and those that its values have or get now."""
        auth = self._written_values().get("auth", {})
        return Words(
            credential=read_secret(self._paths.credential_file, "the stack's credential"),
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

    def _release(self, stack: StackConfig) -> Release:
        values = self._written_values() or values_of(stack, given_values(stack), None)
        return Release.of(stack, values)

    def _stack(self, placed: PlacedFile | None = None) -> StackConfig:
        """Return the stack that is wanted now."""
        placed = placed or PlacedFile.required(self._paths.placed_file, self.name)
        return placed.scaled(load(StackConfig, [self._paths.stack_file]))


def _cluster(stack: StackConfig) -> Cluster:
    return Cluster(stack.kubernetes.context, stack.kubernetes.namespace)


def _selector(stack: StackConfig) -> str:
    return f"app.kubernetes.io/instance={stack.name}"


def _place(stack: StackConfig) -> str:
    return f"namespace {stack.kubernetes.namespace}, context {stack.kubernetes.context}"
