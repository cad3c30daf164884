"""Clean up after a supervisor that could not do it itself.

`processes.json` names every process that the supervisor started. Invariant: sweeping twice, or sweeping a
stack that stopped in order, changes nothing; a running stack is never swept (callers check that its
supervisor is dead).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from flotilla_launch import shared_memory
from flotilla_launch.kin import end_kin
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import ProcessIdentity, read_json, write_json


@dataclass(frozen=True)
class ProcessRecord:
    """One child of the supervisor, as much as it takes to end it and all its kin."""

    name: str
    identity: ProcessIdentity
    mark: str
    shared_memory: list[str] = field(default_factory=list)


def write_records(path: Path, records: list[ProcessRecord]) -> None:
    write_json(path, {"processes": [asdict(record) for record in records]})


def read_records(path: Path) -> list[ProcessRecord]:
    return [
        ProcessRecord(**{**values, "identity": ProcessIdentity(**values["identity"])})
        for values in (read_json(path) or {}).get("processes", [])
    ]


def sweep(paths: StackPaths) -> list[str]:
    """End and remove what a dead supervisor left; returns the names of the processes that still ran."""
    ended = []
    for record in read_records(paths.processes_file):
        if record.identity.alive():
            ended.append(record.name)
        end_kin(record.identity, record.mark)
        shared_memory.remove(record.shared_memory)
    for announce in paths.instances.glob("*.json"):
        pid = (read_json(announce) or {}).get("pid")
        if not isinstance(pid, int) or ProcessIdentity.of(pid) is None:
            announce.unlink(missing_ok=True)
    for path in (paths.socket(), paths.launcher_file, paths.processes_file):
        path.unlink(missing_ok=True)
    return ended
