"""Watch the memory of a stack's services while a test runs, and keep evidence of a service that takes too much.

Invariants: a process that passes `EVIDENCE_MIB` writes its stacks into its log, whatever its loop does; one that passes
`END_MIB` is killed, so that the kernel kills nothing else. The peaks of all processes are kept.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

LOOK_EVERY_S = 0.1
EVIDENCE_MIB = 1024.0
EVIDENCE_EVERY_S = 1.0
END_MIB = 6144.0
LOG_TAIL = 20_000


class MemoryWatch:
    """Context manager that watches the main processes of services, by name, until it is left."""

    def __init__(self, pids: Mapping[str, int], logs: Path, moment: Callable[[], str]) -> None:
        """`logs` holds a file for each service; `moment` says what the test does now."""
        self._pids = pids
        self._logs = logs
        self._moment = moment
        self._over = threading.Event()
        self._asked: dict[str, float] = {}
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)
        self.peak_mib: dict[str, float] = dict.fromkeys(pids, 0.0)
        self.evidence: list[str] = []
        """Descriptions of what each process did that took too much: the moments, and the end of its log."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.evidence += [self._end_of_log(name) for name in self._asked]

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for name, pid in self._pids.items():
                try:
                    mib = psutil.Process(pid).memory_info().rss / 2**20
                    self._look(name, pid, mib)
                except (psutil.NoSuchProcess, ProcessLookupError):
                    continue  # The test says which processes were replaced.

    def _look(self, name: str, pid: int, mib: float) -> None:
        self.peak_mib[name] = max(self.peak_mib[name], mib)
        if mib > END_MIB:
            self.evidence.append(f"{name} was killed at {mib:.0f} MiB, {self._moment()}")
            os.kill(pid, signal.SIGKILL)
        elif mib > EVIDENCE_MIB and time.monotonic() - self._asked.get(name, 0.0) > EVIDENCE_EVERY_S:
            self._asked[name] = time.monotonic()
            self.evidence.append(f"{name} takes {mib:.0f} MiB, {self._moment()}")
            os.kill(pid, signal.SIGUSR1)

    def _end_of_log(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return f"the end of {path}:\n{path.read_bytes()[-LOG_TAIL:].decode(errors='replace')}"
