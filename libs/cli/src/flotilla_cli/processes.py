"""Shows the processes of a stack in the output of commands, and their progress during a boot.

Invariants: a boot is reported on stderr, as a live table on a terminal and as one line for each event elsewhere. Every
process has its present activity and its duration. A log repeats nothing, and a slow boot says every ten seconds what it
waits for. An engine on a GPU starts in phases, which its log names as they end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_ENVIRONMENT, SERVICE_KIND_REWARD
from flotilla.coordinator.v1.coordinator_pb2 import Service
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_cli.output import age, console_on, say, version_text
from flotilla_core import kinds
from flotilla_core.kinds import kind_name
from flotilla_core.log_files import HEADER, tail
from flotilla_launch.table import NATS
from flotilla_workers.jail.level import told

if TYPE_CHECKING:
    from rich.table import Table


COLUMNS = ("NAME", "KIND", "STATE", "PID", "ADDRESS", "RESTARTS", "SINCE", "VERSION")

Show = Callable[[list["ProcessStatus"]], None]
REMIND_S = 10.0
_ENGINE_PHASES = {
    "Model loading took": "compiles its model",
    "torch.compile and initial profiling": "measures the memory for its KV cache",
    "torch.compile took": "measures the memory for its KV cache",
    "GiB memory for KV Cache as specified": "captures its graphs",
    "Available KV cache memory": "captures its graphs",
    "Graph capturing finished": "decodes its first tokens",
}
"""The work of an engine after a line of vLLM's log, by a part of that line."""
_LINES_OF_A_START = 400
_BYTES_OF_A_START = 1 << 20
_STARTING = 1
_STATES = {
    _STARTING: "PROCESS_STATE_STARTING",
    2: "PROCESS_STATE_READY",
    3: "PROCESS_STATE_STOPPING",
    4: "PROCESS_STATE_FAILED",
}
"""States of a process by those of a registration; one that drains exits."""


def process_json(process: ProcessStatus, service: Service | None = None) -> dict[str, Any]:
    """Describe one process in the output of `up`, `ps` and `scale`."""
    return {
        "name": process.name,
        "kind": kind_of(process),
        "state": state_of(process),
        "pid": process.pid or None,
        "address": process.address or None,
        "instance_id": process.instance_id or None,
        "restarts": process.restarts,
        "since": process.since.ToJsonString(),
        "log": process.log_path or None,
        "error": process.error or None,
        "policy_version": _version(service),
        "asleep": service is not None and service.asleep,
        "run_id": service.run_id or None if service is not None else None,
        "isolation": service.registration.isolation or None if service is not None else None,
    }


def process_row(process: ProcessStatus, service: Service | None = None) -> tuple[str, ...]:
    """Describe one process as a line below COLUMNS."""
    return (
        process.name,
        kind_of(process),
        "asleep" if service is not None and service.asleep else state_of(process),
        str(process.pid or ""),
        process.address,
        str(process.restarts),
        age(process.since),
        _version(service) or "",
    )


def process_table(
    processes: list[ProcessStatus], services: dict[str, Service]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and lines of a table; without that of versions where no run has given a process one.

    A version is one of a run. Between two runs no process serves any.
    """
    rows = [process_row(process, services.get(process.name)) for process in processes]
    shown = len(COLUMNS) if any(row[-1] for row in rows) else len(COLUMNS) - 1
    return COLUMNS[:shown], [row[:shown] for row in rows]


def say_isolation(levels: Mapping[str, str]) -> None:
    """Say in which jail functions of users run on these services; one of an earlier release does not know."""
    names: dict[str, list[str]] = {}
    for name, isolation in levels.items():
        names.setdefault(isolation, []).append(name)
    for isolation, those in names.items():
        if isolation:
            say(f"{', '.join(those)}: {told(isolation)}")


def isolation_of(services: dict[str, Service]) -> dict[str, str]:
    """Return the isolation of those among these that run code of users."""
    return {
        name: service.registration.isolation
        for name, service in sorted(services.items())
        if service.registration.kind in (SERVICE_KIND_REWARD, SERVICE_KIND_ENVIRONMENT)
    }


def as_the_coordinator_sees(
    processes: list[ProcessStatus], services: dict[str, Service]
) -> list[ProcessStatus]:
    """Add the services that were started elsewhere, and say why one that says READY is not admitted."""
    known = {process.name for process in processes}
    seen = list(processes)
    for name in sorted(services.keys() - known):
        one = services[name].registration
        state = _STATES.get(one.state, "PROCESS_STATE_UNSPECIFIED")
        status = ProcessStatus(name=name, kind=one.kind, state=ProcessState.Value(state), address=one.address)
        status.pid, status.instance_id = one.pid, one.instance_id
        status.since.CopyFrom(one.started_at)
        seen.append(status)
    for process in seen:
        service = services.get(process.name)
        if service is not None and service.work_state_reason and service.registration.state == _STARTING:
            process.state = ProcessState.PROCESS_STATE_STARTING
            process.error = service.work_state_reason
    return seen


def kind_of(process: ProcessStatus) -> str:
    """Return the kind of a process: `generator`, `trainer`, ..., or `nats`."""
    # Of all processes, only servers of NATS are no services of Flotilla.
    return kind_name(process.kind) if process.kind else NATS


def state_of(process: ProcessStatus) -> str:
    """Return the state's name, such as `ready` for PROCESS_STATE_READY."""
    return ProcessState.Name(process.state).removeprefix("PROCESS_STATE_").lower()


def _version(service: Service | None) -> str | None:
    if service is None or not service.HasField("live_version"):
        return None
    return version_text(service.live_version)


@contextmanager
def boot_progress() -> Iterator[Show]:
    """Yield the function to call with the processes whenever their states are known."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.live import Live

    screen = _Screen()
    with Live(screen, console=console_on(sys.stderr), refresh_per_second=4, transient=True):
        yield screen.show


def doing(process: ProcessStatus) -> str:
    """Describe the present activity of a process for a person."""
    if process.state == ProcessState.PROCESS_STATE_STARTING:
        if process.error:
            return process.error.splitlines()[0]
        # The address is known as soon as the port is open; the slow work comes after that.
        if process.kind and not process.address:
            return "its process starts"
        return _engine_phase(process) or (
            kinds.kind_of(process.kind).boots if process.kind else "opens its store"
        )
    why = process.error.splitlines()[0] if process.error else ""
    return f"{state_of(process)}: {why}" if why else state_of(process)


def _engine_phase(process: ProcessStatus) -> str:
    """Return what a starting engine does by the log of its present start; nothing where that does not say it."""
    if kind_of(process) != "generator" or not process.log_path:
        return ""
    for line in reversed(tail(Path(process.log_path), _LINES_OF_A_START, most_bytes=_BYTES_OF_A_START)):
        if line.startswith(HEADER):
            break
        for mark, what in _ENGINE_PHASES.items():
            if mark in line:
                return what
    return ""


class _Durations:
    """Knows for how long each process has done what it does."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}

    def of(self, process: ProcessStatus, what: str) -> float:
        """Return the seconds since this process was first said to do this."""
        now = time.monotonic()
        known, since = self._since.get(process.name, ("", now))
        if known != what:
            since = now
            self._since[process.name] = what, now
        return now - since


class _Screen:
    """The table on a terminal, which redraws itself while it is shown."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._processes: list[ProcessStatus] = []
        self._durations = _Durations()

    def show(self, processes: list[ProcessStatus]) -> None:
        self._processes = processes

    def __rich__(self) -> Table:
        from rich.table import Table

        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        table.add_row("", f"{now - self._begun:.0f} s", "starting")
        for process in self._processes:
            what = doing(process)
            seconds = self._durations.of(process, what)
            table.add_row(process.name, "" if what == "ready" else f"{seconds:.0f} s", what)
        return table


class _Lines:
    """Prints each ready, restarting or failed process once, and every ten seconds those that are still awaited."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._reminded = self._begun
        self._said: dict[str, str] = {}
        self._durations = _Durations()

    def show(self, processes: list[ProcessStatus]) -> None:
        now = time.monotonic()
        starting: list[str] = []
        for process in processes:
            what = doing(process)
            seconds = self._durations.of(process, what)
            if process.state == ProcessState.PROCESS_STATE_STARTING:
                starting.append(f"{process.name} {what}, for {seconds:.0f} s")
            elif self._said.get(process.name) != what:
                self._said[process.name] = what
                say(f"  {now - self._begun:5.1f} s  {process.name:14} {what}")
        if starting and now - self._reminded >= REMIND_S:
            self._reminded = now
            say(f"  {now - self._begun:5.1f} s  waiting: {'; '.join(starting)}")
