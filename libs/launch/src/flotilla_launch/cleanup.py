"""End in order what no launcher looks after any more: `python -m flotilla_launch.cleanup DIRECTORY`.

`processes.json` names every process that the launcher started. Invariants: cleaning up twice, or cleaning up a stack
that stopped in order, changes nothing; a stack whose launcher lives is never touched (callers hold its lock); NATS is
the last to go. A coordinator that is told to stop ends its runs, so it is told only where the user took the stack down:
otherwise it is killed, before it sees the others go, and the next one continues with the runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch import shared_memory
from flotilla_launch.paths import StackPaths
from flotilla_launch.process_tree import MARK, end_tree, kill_all, tree_of
from flotilla_launch.records import ProcessRecord, StackRecord
from flotilla_launch.stack_lock import hold_lock, is_held
from flotilla_launch.state import read_json

CLEANUP_LIMIT_S = 45.0
"""The time for three graces, one after the other, and for a look around."""
_GRACE_S = 10.0
_POLL_S = 0.02
_COORDINATOR, _NATS = "coordinator", "nats"


def clean_up(paths: StackPaths, *, runs_go_on: bool) -> list[str]:
    """End and remove what a dead launcher left; returns the names of the processes that still ran.

    `runs_go_on`: the next coordinator continues with the runs of this one.
    """
    record = StackRecord.read(paths.processes_file) or StackRecord()
    ended = [process.name for process in record.processes if process.alive]
    coordinator = [process for process in record.processes if process.name == _COORDINATOR]
    services = [process for process in record.processes if process.name not in (_COORDINATOR, _NATS)]
    if runs_go_on:
        _end(coordinator, grace_s=0)
        _end(services)
    else:
        _end(services)
        _end(coordinator)
    _end([process for process in record.processes if process.name == _NATS])
    for announce in paths.instances.glob("*.json"):
        pid = (read_json(announce) or {}).get("pid")
        if not isinstance(pid, int) or ProcessIdentity.of(pid) is None:
            announce.unlink(missing_ok=True)
    for path in (paths.socket(), paths.launcher_file, paths.processes_file):
        path.unlink(missing_ok=True)
    return ended


def main() -> None:
    """Run the clean-up of a lease that is over; its watcher starts this."""
    paths = StackPaths(Path(sys.argv[1]))
    with hold_lock(paths.launcher_lock_file, timeout_s=CLEANUP_LIMIT_S) as held:
        if not held or is_held(paths.guardian_lock_file):
            return
        ended = clean_up(paths, runs_go_on=True)
        if ended:
            say(f"launcher and guardian are gone; the stack was ended: {', '.join(ended)}")
        # Also a service that no file names any more.
        end_tree(None, os.environ.get(MARK, ""))


def _end(processes: list[ProcessRecord], grace_s: float = _GRACE_S) -> None:
    """SIGTERM to the services alone and a grace for draining, where there is one; SIGKILL of all that is left."""
    for process in processes:
        if process.alive:
            tree = tree_of(process.identity, process.mark)
            process.shared_memory.extend(shared_memory.held_by(one.pid for one in tree))
    leaders = [process.identity for process in processes if process.identity is not None]
    if grace_s:
        kill_all(leaders, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(leader.alive() for leader in leaders) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in processes:
        end_tree(process.identity, process.mark)
        shared_memory.remove(process.shared_memory)


def say(text: str) -> None:
    """Write a line to the log of the launcher at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
