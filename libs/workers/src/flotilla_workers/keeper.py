"""The parent of one worker: it ends everything that the worker started, wherever that went.

Run as `python -I -S keeper.py CHANNEL_FD GROUPS COMMAND...`; only the standard library is imported, so it is small and
starts fast. It runs the command as its child, with the channel and in the groups of the kernel whose entries it is
given, and ends as the command ended.

Invariants: whatever the command starts stays a descendant of this process, because orphans come back to it, even those
that left the session (`PR_SET_CHILD_SUBREAPER`). When the command ends, or the other side of the channel closes, every
descendant is killed before this process ends. It reads and writes nothing on the channel.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 5.0
"""The time that the descendants have to die; one that the kernel holds is left behind after this."""


def main() -> None:
    channel, groups, command = int(sys.argv[1]), sys.argv[2].split(":"), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakes, awake = os.pipe()
    for end in (wakes, awake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        for entry in filter(None, groups):
            with open(entry, "w") as file:
                file.write("0")
        # The argument that follows the command's own is the process that it must not outlive.
        os.execv(command[0], [*command, str(channel), str(os.getppid())])
    # A command that signals its parent must not keep it from its work.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    status = _watch(worker, channel, wakes)
    ended = _end_all()
    _end_as(status if status is not None else ended.get(worker, signal.SIGKILL))


def _watch(worker: int, channel: int, wakes: int) -> int | None:
    """Return the status of the worker when it has ended; None when the channel has closed."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.register(wakes, select.POLLIN)
    while True:
        happened = dict(poll.poll())
        if wakes in happened:
            os.read(wakes, 4096)
        ended = _reap()
        if worker in ended:
            return ended[worker]
        if channel in happened:
            return None


def _reap() -> dict[int, int]:
    """Return the statuses of the children that have ended, of orphans too."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _end_all() -> dict[int, int]:
    """Kill every child until none is left: the children of one that dies become ours."""
    ended: dict[int, int] = {}
    latest = time.monotonic() + KILL_LIMIT_S
    while (children := _children()) and time.monotonic() < latest:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # It ended by itself, or runs with rights that are not ours.
        ended |= _reap()
        time.sleep(0.001)
    return ended | _reap()


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


def _end_as(status: int) -> None:
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()


if __name__ == "__main__":
    main()
