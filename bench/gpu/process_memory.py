"""What each process of a stack takes of the GPUs: its own line of nvidia-smi, five times a second.

All samples go to `memory.csv`; a summary with the peak of each process, and with the role of the process, is printed at
the end. Nothing happens on a host without nvidia-smi.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from figures import say

from flotilla_testing.stack import Stack

EVERY_MS = 200
LOOK_S = 2.0
QUERY = "timestamp,gpu_uuid,pid,used_memory"


@contextmanager
def watched(out: Path, stack: Stack) -> Iterator[None]:
    """Sample the memory of the processes while the block runs."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    file, over = out / "memory.csv", threading.Event()
    roles: dict[str, str] = {}
    looking = threading.Thread(target=_name_processes, args=(stack, roles, over), daemon=True)
    command = ["nvidia-smi", f"--query-compute-apps={QUERY}", "--format=csv,noheader,nounits"]
    with file.open("w") as samples:
        sampling = subprocess.Popen([*command, f"--loop-ms={EVERY_MS}"], stdout=samples)
        looking.start()
        try:
            yield
        finally:
            over.set()
            sampling.terminate()
            sampling.wait()
            looking.join()
    for (gpu, pid), peak_mib in sorted(_peaks(file).items()):
        say(out, gpu=gpu, pid=pid, role=roles.get(pid, ""), peak_gib=round(peak_mib / 1024, 2))


def _name_processes(stack: Stack, roles: dict[str, str], over: threading.Event) -> None:
    """Remember which service each process belongs to, also of processes that end."""
    while not over.wait(LOOK_S):
        for announced in (stack.directory / "instances").glob("*.json"):
            with suppress(psutil.Error, KeyError, ValueError, OSError):
                service = stack.process(announced.stem)
                for process in (service, *service.children(recursive=True)):
                    title = " ".join(process.cmdline())[:60] or process.name()
                    roles[str(process.pid)] = f"{announced.stem}: {title}"


def _peaks(file: Path) -> dict[tuple[str, str], float]:
    """Return the largest number of MiB of each process on each GPU."""
    peaks: dict[tuple[str, str], float] = {}
    with file.open() as samples:
        for row in csv.reader(samples, skipinitialspace=True):
            # The last line may be cut off, and drivers write "[N/A]" for a process that just began.
            if len(row) == 4 and row[3].isdigit():
                key = row[1], row[2]
                peaks[key] = max(peaks.get(key, 0.0), float(row[3]))
    return peaks
