"""The parent of one worker: it ends everything that the worker started, wherever that went.

Run as `python -I -S keeper.py CHANNEL_FD GROUPS COMMAND...`; only the standard library is imported, so it is small and
starts fast. It runs the command as its child, with the channel and in the groups of the kernel whose entries it is
given, and ends as the command ended.

It passes on what the command prints, to its own standard error: MOST_PRINTED_BYTES at once, and PRINTED_BYTES_A_S from
then on. The rest is left out, so no flood fills the disk with the log, or takes the end of a file from others.

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

MOST_PRINTED_BYTES = 1 << 20
PRINTED_BYTES_A_S = 16 << 10
LOG_LIMIT_S = 0.2
"""The time that a log may take for a part; one that takes longer loses parts until it takes one at once."""
PIPE_BYTES = 4096
"""The part that a pipe takes without waiting, once it takes anything."""
PARTS_OF_A_PIPE = 64
"""More than a pipe holds, as the kernel makes it."""
LOG = 2


def main() -> None:
    channel, groups, command = int(sys.argv[1]), sys.argv[2].split(":"), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakes, awake = os.pipe()
    for end in (wakes, awake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    printed, prints = os.pipe()
    os.set_blocking(printed, False)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        for standard in (1, 2):
            os.dup2(prints, standard)
        for entry in filter(None, groups):
            with open(entry, "w") as file:
                file.write("0")
        # The argument that follows the command's own is the process that it must not outlive.
        os.execv(command[0], [*command, str(channel), str(os.getppid())])
    os.close(prints)
    log = Log(printed)
    # A command that signals its parent must not keep it from its work.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    status = _watch(worker, channel, wakes, log)
    ended = _end_all()
    log.finish()
    _end_as(status if status is not None else ended.get(worker, signal.SIGKILL))


class Log:
    """The output of the command on its way to the log of the service, within bounds."""

    def __init__(self, printed: int) -> None:
        self.printed = printed
        self._room = float(MOST_PRINTED_BYTES)
        self._at = time.monotonic()
        self._left_out = 0
        self._patience_s = LOG_LIMIT_S

    def pass_on(self) -> bool:
        """Pass on a part; return whether there may be more, now or later."""
        try:
            part = os.read(self.printed, 1 << 16)
        except BlockingIOError:
            return True  # What was there the command read itself, as it may: `/proc/self/fd/1`.
        now = time.monotonic()
        self._room = min(self._room + (now - self._at) * PRINTED_BYTES_A_S, MOST_PRINTED_BYTES)
        self._at = now
        kept = part[: int(self._room)]
        self._room -= len(kept)
        if kept and self._left_out:
            self._tell()
        self._left_out += len(part) - len(kept)
        for first in range(0, len(kept), PIPE_BYTES):
            self._write(kept[first : first + PIPE_BYTES])
        return bool(part)

    def finish(self) -> None:
        """Pass on what is left of processes that have ended, and say what was left out."""
        for _ in range(PARTS_OF_A_PIPE):
            if not self.pass_on():
                break
        if self._left_out:
            self._tell()

    def _tell(self) -> None:
        self._write(f"\n[{self._left_out} bytes that a worker printed are left out]\n".encode())
        self._left_out = 0

    def _write(self, part: bytes) -> None:
        # Nobody may read the log, and what ends the worker must not wait for that.
        if select.select([], [LOG], [], self._patience_s)[1]:
            try:
                os.write(LOG, part)
                self._patience_s = LOG_LIMIT_S
                return
            except OSError:
                pass
        self._patience_s = 0.0
        self._left_out += len(part)


def _watch(worker: int, channel: int, wakes: int, log: Log) -> int | None:
    """Return the status of the worker when it has ended; None when the channel has closed."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    for descriptor in (wakes, log.printed):
        poll.register(descriptor, select.POLLIN)
    while True:
        happened = dict(poll.poll())
        if log.printed in happened and not log.pass_on():
            poll.unregister(log.printed)
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
