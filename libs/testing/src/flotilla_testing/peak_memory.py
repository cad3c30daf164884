"""The most memory that a process ever held, by the kernel's own mark.

`getrusage` answers another question: it counts what the parent held when it started the process. A small child
of a large test process looks large there, and its growth looks like none.
"""

from __future__ import annotations

from pathlib import Path


def most_memory_kib(pid: int | str = "self") -> int:
    """Return the largest resident memory that a process had since it began to run its program."""
    status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    return int(status.partition("VmHWM:")[2].split()[0])


def forget_most_memory() -> None:
    """Let the mark of this process begin again at what it holds now."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")
