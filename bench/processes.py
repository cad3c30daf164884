"""CPU time of the processes of a stack, by what they are."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

NATS = "nats-server"


class StackProcesses:
    """Every service that has announced itself, with its children, and the stack's NATS."""

    def __init__(self, state_dir: Path) -> None:
        self._processes: dict[str, list[psutil.Process]] = {}
        for path in sorted((state_dir / "instances").glob("*.json")):
            process = psutil.Process(json.loads(path.read_text())["pid"])
            self._processes[path.stem] = [process, *process.children(recursive=True)]
        launcher = psutil.Process(json.loads((state_dir / "launcher.json").read_text())["pid"])
        self._processes["nats"] = [p for p in launcher.children(recursive=True) if NATS in p.name()]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by name."""
        return {
            name: sum(times.user + times.system for times in (one.cpu_times() for one in processes))
            for name, processes in self._processes.items()
        }
