"""How a stack is seen to come up: a live table on a terminal, a line an event anywhere else. All of it on stderr.

Invariants: every process is named with what it does now and for how long; in a log nothing is said twice, and a
boot that takes long says every ten seconds what it waits for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flotilla_coordinator.cli.output import say, wants_colour

if TYPE_CHECKING:
    from rich.table import Table

    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus

Show = Callable[[list["ProcessStatus"]], None]
REMIND_S = 10.0
_WORK = {
    "nats": "opens its store",
    "generator": "loads the model into its engine",
    "trainer": "starts its ranks, which load the model",
    "reward": "starts its workers",
    "coordinator": "opens the ledger and the timeline",
}


@contextmanager
def boot_progress() -> Iterator[Show]:
    """Gives the function to call with the processes, as often as they are known."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.console import Console
    from rich.live import Live

    screen = _Screen()
    console = Console(stderr=True, no_color=not wants_colour(sys.stderr), highlight=False)
    with Live(screen, console=console, refresh_per_second=4, transient=True):
        yield screen.show


def doing(process: ProcessStatus) -> str:
    """What a process does now, for a person."""
    from flotilla.launcher.v1.launcher_pb2 import ProcessState
    from flotilla_coordinator.cli.processes import kind_of, state_of

    if process.state == ProcessState.PROCESS_STATE_STARTING:
        # The address is known as soon as the port is open; what takes long comes after.
        return _WORK[kind_of(process)] if process.address or not process.kind else "its process starts"
    why = process.error.splitlines()[0] if process.error else ""
    return f"{state_of(process)}: {why}" if why else state_of(process)


class _Screen:
    """The table on a terminal; it draws itself again while it is shown."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._processes: list[ProcessStatus] = []
        self._since: dict[tuple[str, str], float] = {}

    def show(self, processes: list[ProcessStatus]) -> None:
        self._processes = processes

    def __rich__(self) -> Table:
        from rich.table import Table

        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        table.add_row("", f"{now - self._begun:.0f} s", "starting")
        for process in self._processes:
            what = doing(process)
            seconds = now - self._since.setdefault((process.name, what), now)
            table.add_row(process.name, "" if what == "ready" else f"{seconds:.0f} s", what)
        return table


class _Lines:
    """What is ready, restarting or failed, once each; every ten seconds what is still waited for."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._reminded = self._begun
        self._said: dict[str, str] = {}

    def show(self, processes: list[ProcessStatus]) -> None:
        from flotilla.launcher.v1.launcher_pb2 import ProcessState

        now = time.monotonic()
        starting = [p for p in processes if p.state == ProcessState.PROCESS_STATE_STARTING]
        for process in processes:
            what = doing(process)
            if process not in starting and self._said.get(process.name) != what:
                self._said[process.name] = what
                say(f"  {now - self._begun:5.1f} s  {process.name:14} {what}")
        if starting and now - self._reminded >= REMIND_S:
            self._reminded = now
            waits = "; ".join(f"{process.name} {doing(process)}" for process in starting)
            say(f"  {now - self._begun:5.1f} s  waiting: {waits}")
