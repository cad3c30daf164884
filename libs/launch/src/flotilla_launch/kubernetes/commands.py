"""Runs the user's own `helm` and `kubectl`, and says what their errors mean.

Invariants: a command names context and namespace where they are known, so a switch of the current context never sends
one to another cluster; no secret is on a command line; a command that does not answer is ended; what a tool printed is
in the error, under what it means and what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from flotilla_core.log_files import LONGEST_LINE_BYTES, line_text
from flotilla_launch.engine_commands import end, outcome, refused, started

_ASK_LIMIT_S = 60.0
_CHANGE_LIMIT_S = 300.0
_MISSING = {
    "helm": "install Helm (3.14 or newer), or install the chart by other means: deploy/helm/README.md",
    "kubectl": "install kubectl, of a version near that of the cluster",
}


@dataclass(frozen=True)
class _Meaning:
    """Says what an error text of a tool means."""

    pattern: str
    kind: type[FlotillaError]
    what: str
    next_step: str


# The first one that is found counts. Texts are those of kubectl, of the API server and of Helm 3 and 4.
_MEANINGS = (
    _Meaning(
        r"exceeded quota",
        FailedPrecondition,
        "a quota of the namespace is used up",
        "see it: kubectl describe quota; ask for more, or for a smaller stack",
    ),
    _Meaning(
        r"\(Forbidden\)|is forbidden:",
        PermissionDenied,
        "your user may not do this in the namespace",
        "see what you may: kubectl auth can-i --list; the launcher needs what Helm needs for the chart, "
        "and to read pods, logs and events, to scale, and to run commands in a pod",
    ),
    _Meaning(
        r"Unauthorized|must be logged in to the server|asked for the client to provide credentials",
        Unauthenticated,
        "the cluster does not know your user",
        "log in again, as your cluster wants it; kubectl get pods must answer",
    ),
    _Meaning(
        r"current-context is not set|no configuration has been provided|Missing or incomplete configuration",
        FailedPrecondition,
        "kubectl has no cluster",
        "set KUBECONFIG, or choose one: kubectl config get-contexts, kubectl config use-context NAME",
    ),
    _Meaning(
        r"context \"?[^\s\"]+\"? does not exist|no context exists with the name",
        InvalidConfig,
        "there is no such context",
        "name one of these in kubernetes.context: kubectl config get-contexts",
    ),
    _Meaning(
        r"[Kk]ubernetes cluster unreachable"
        r"|[Tt]he connection to the server .* was refused|Unable to connect to the server"
        r"|connection refused|no such host|i/o timeout|TLS handshake timeout",
        Unavailable,
        "the cluster does not answer",
        "see whether kubectl get pods answers: a tunnel or a VPN may be missing",
    ),
    _Meaning(
        r"namespaces \"?[^\s\"]+\"? not found",
        FailedPrecondition,
        "the namespace does not exist",
        "make it: kubectl create namespace NAME; or name another one in kubernetes.namespace",
    ),
    _Meaning(
        r"another operation \(install/upgrade/rollback\) is in progress",
        FailedPrecondition,
        "an earlier command of Helm was cut off, or still works on the release",
        "wait for it; if none is at work: flotilla down, then flotilla up",
    ),
    _Meaning(
        r"don't meet the specifications of the schema|execution error at",
        InvalidConfig,
        "the chart refuses these values",
        "correct the files of kubernetes.values, or the stack file for what is below `stack`",
    ),
    _Meaning(
        r"chart requires kubeVersion",
        FailedPrecondition,
        "the cluster is too old for the chart",
        "use a cluster of Kubernetes 1.30 or newer",
    ),
    _Meaning(
        r"no matches for kind|ensure CRDs are installed first",
        FailedPrecondition,
        "the cluster does not know a kind that these values need",
        "install its controller (cert-manager, JobSet, KEDA), or switch the value off",
    ),
    _Meaning(
        r"updates to statefulset spec for fields other than|field is immutable",
        FailedPrecondition,
        "Kubernetes cannot change this in place",
        "flotilla down, then flotilla up: claims and runs stay",
    ),
)


@dataclass(frozen=True)
class Cluster:
    """One namespace of one cluster, as helm and kubectl are told it."""

    context: str | None
    namespace: str

    def kubectl_command(self, *arguments: str) -> list[str]:
        """Return the command line of kubectl."""
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "--namespace", self.namespace, *arguments]

    async def kubectl(self, *arguments: str) -> str:
        """Return what kubectl prints; raise what its error means."""
        return await run(self.kubectl_command(*arguments), _ASK_LIMIT_S)

    async def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects that `kubectl get` finds."""
        found = json.loads(await self.kubectl("get", *arguments, "--output", "json"))
        items: list[dict[str, Any]] = found.get("items", [found])
        return items

    async def helm(self, *arguments: str, limit_s: float = _CHANGE_LIMIT_S) -> str:
        """Return what Helm prints; raise what its error means."""
        context = ["--kube-context", self.context] if self.context else []
        return await run(["helm", *arguments, *context, "--namespace", self.namespace], limit_s)

    async def release(self, name: str) -> dict[str, Any] | None:
        """Return version of the chart and status of a release; None where Helm has none of this name there."""
        try:
            told = await self.helm("get", "metadata", name, "--output", "json", limit_s=_ASK_LIMIT_S)
        except NotFound:
            return None
        found: dict[str, Any] = json.loads(told)
        return found

    async def lines(self, *arguments: str) -> AsyncGenerator[str]:
        """Give each line that kubectl prints, until it ends or the reader stops."""
        command = self.kubectl_command(*arguments)
        process = await started(command, _MISSING[command[0]])
        assert process.stdout is not None and process.stderr is not None
        try:
            rest = b""
            while block := await process.stdout.read(LONGEST_LINE_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                if len(rest) >= LONGEST_LINE_BYTES:  # Its end is not waited for.
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    yield line_text(line)
            if rest:
                yield line_text(rest)
            if await process.wait():
                told = await process.stderr.read(LONGEST_LINE_BYTES)
                raise meaning_of(command, told.decode(errors="replace"))
        finally:
            await end(process)


async def current_context() -> str:
    """Return the context that kubectl uses when it is told none."""
    return (await run(["kubectl", "config", "current-context"], _ASK_LIMIT_S)).strip()


async def run(command: Sequence[str], limit_s: float) -> str:
    """Run a command; return what it prints, and raise what its error means."""
    status, out, err = await outcome(command, limit_s, _MISSING[command[0]])
    if status:
        raise meaning_of(command, err)
    return out


def meaning_of(command: Sequence[str], text: str) -> FlotillaError:
    """Return the error that a failed command of helm or kubectl means."""
    where, why = " ".join(command), text.strip()
    if re.search(r"release: not found", text):
        return NotFound("Helm has no such release", where=where, why=why)
    for meaning in _MEANINGS:
        if re.search(meaning.pattern, text):
            return meaning.kind(meaning.what, where=where, why=why, next_step=meaning.next_step)
    return refused(command, why, "run the command by hand")
