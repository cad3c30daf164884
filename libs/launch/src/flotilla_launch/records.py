"""`processes.json`: what a launcher runs, for the launcher after it.

The next launcher continues with what it names, and a cleanup ends it. Invariants: a process is written down before it
is started, so none is ever unknown to the file (until its id is known it is found by its mark); a file that an older
release wrote can still be ended.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch.state import read_json, write_json


class Phase(StrEnum):
    """The action of the launcher on the stack as a whole."""

    STARTING = "starting"
    """The stack is not up yet: when its launcher dies, what was started is ended."""
    UP = "up"
    """The stack is up: when its launcher dies, the next one continues with it."""
    STOPPING = "stopping"
    """The stack is being ended: when its launcher dies, the rest is ended."""


@dataclass(frozen=True)
class ProcessRecord:
    """One slot of the stack, and the process that fills it now."""

    name: str
    identity: ProcessIdentity | None
    """The process; None where nothing runs, or was started just now."""
    mark: str
    """The mark of the process; empty where nothing was started."""
    shared_memory: list[str] = field(default_factory=list)
    kind: int = 0
    index: int = 0
    surplus: bool = False
    """True while it is being scaled away."""
    deaths: list[float] = field(default_factory=list)
    """The deaths that its restart budget was spent on, on the monotonic clock of this boot."""
    log_start: int = 0
    """The place in the log file at which the log of this start begins."""
    status: dict[str, Any] = field(default_factory=dict)
    """The fields of its ProcessStatus."""

    @property
    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()


@dataclass(frozen=True)
class StackRecord:
    """The whole file."""

    phase: Phase = Phase.STARTING
    nats_url: str = ""
    otlp: str = ""
    processes: list[ProcessRecord] = field(default_factory=list)
    releases: dict[str, str] = field(default_factory=dict)
    """Folders of the commands from which replicas start, by kind, where an upgrade named another one."""

    @classmethod
    def read(cls, path: Path) -> StackRecord | None:
        """None where there is no such file, or no readable one."""
        values = read_json(path)
        if values is None:
            return None
        return cls(
            phase=Phase(values.get("phase", Phase.STARTING)),
            nats_url=values.get("nats_url", ""),
            otlp=values.get("otlp", ""),
            processes=[_process(entry) for entry in values.get("processes", [])],
            releases=values.get("releases", {}),
        )

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def _process(values: dict[str, Any]) -> ProcessRecord:
    known = {one.name for one in fields(ProcessRecord)}
    given = {name: value for name, value in values.items() if name in known}
    identity = given["identity"]
    return ProcessRecord(**{**given, "identity": ProcessIdentity(**identity) if identity else None})
