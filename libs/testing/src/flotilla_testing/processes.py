"""What the processes of a stack use, by what they are."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from flotilla_launch.records import StackRecord

NATS = "nats"
MIB = 1 << 20


class StackProcesses:
    """Every service that has announced itself, with its children, and the stack's NATS; several may share a process."""

    def __init__(self, state_dir: Path) -> None:
        self._processes: dict[str, set[psutil.Process]] = {}
        for path in sorted((state_dir / "instances").glob("*.json")):
            announced = json.loads(path.read_text())
            process = psutil.Process(announced["pid"])
            self._processes.setdefault(announced["kind"], set()).update(
                {process, *process.children(recursive=True)}
            )
        record = StackRecord.read(state_dir / "processes.json")
        assert record is not None, "the stack runs"
        self._processes[NATS] = {
            psutil.Process(process.identity.pid)
            for process in record.processes
            if process.name == NATS and process.identity is not None
        }

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by kind."""
        return {
            kind: sum(times.user + times.system for times in (one.cpu_times() for one in processes))
            for kind, processes in self._processes.items()
        }

    def resident_mib(self, kind: str) -> float:
        """Memory that the processes of a kind hold now."""
        return sum(one.memory_info().rss for one in self._processes[kind]) / MIB
