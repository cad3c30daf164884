"""A rank on this host: its process, its connection, its log and its stacks.

Invariants: the process leads a process group of its own and is killed with it; the connection breaks when the process
is gone; nothing here waits for the process without a limit, except `gone`, whose caller has killed it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from flotilla_core.log_files import keep_bounded, tail
from flotilla_trainer.gang.fork_server import RankChild, RankForkServer, RankOrder
from flotilla_trainer.gang.plan import GangPlan

STACK_DUMP_TIMEOUT_S = 5.0
STACK_DUMP_QUIET_S = 0.25
POLL_S = 0.05
LINE_BREAKS_WITHIN_S = 2.0
_LAST_LINES = 100
_LAST_BYTES = 16 << 10
_LONGEST_LINE = 1000
_MOST_STACKS_BYTES = 4 << 20


class LocalRank:
    """A rank that a fork server of this process forked."""

    where = ""
    """The host in messages to users; empty for this one."""

    def __init__(
        self,
        child: RankChild,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        files: tuple[Path, Path],
        log_start: int,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._child = child
        self._log, self._stacks = files
        self.pid = child.pid
        self.log, self.stacks_file = map(str, files)
        self._log_start = log_start
        self._ending = asyncio.create_task(child.wait(), name=f"end of rank {child.pid}")

    @classmethod
    async def start(cls, plan: GangPlan, rank: int, fork_server: RankForkServer) -> LocalRank:
        """Fork the process and open the connection."""
        ours, theirs = socket.socketpair()
        files = plan.log_path(rank), plan.stacks_path(rank)
        files[0].parent.mkdir(parents=True, exist_ok=True)
        keep_bounded([files[0]])
        with theirs, files[0].open("ab") as log:
            log_start = log.tell()
            order = RankOrder(f"rank-{rank} {plan.name}", str(files[1]), plan.environment())
            child = await fork_server.rank(order, theirs, log, plan.slow_timeout_s)
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(child, reader, writer, files, log_start)

    def ended(self) -> str:
        """Describe how the process ended; empty while it lives."""
        code = self._child.returncode
        if code is None:
            return ""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def last_log_line(self) -> str:
        """Return the last line that this process wrote, which names the error of a rank that failed."""
        lines = tail(self._log, _LAST_LINES, start=self._log_start, most_bytes=_LAST_BYTES)
        said = (line.strip() for line in reversed(lines))
        return next((line[:_LONGEST_LINE] for line in said if line), "")

    async def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP or a debugger."""
        return _is_stopped(self.pid)

    async def stacks(self, *, wake: bool = False) -> str:
        """Return the stacks of all its threads; `wake` continues a stopped process so that it can write them."""
        if not wake and _is_stopped(self.pid):
            return ""
        path = self._stacks
        before = path.stat().st_size if path.exists() else 0
        try:
            self._child.send_signal(signal.SIGUSR1)
            if wake:
                self._child.send_signal(signal.SIGCONT)
        except ProcessLookupError:
            return ""
        # The dump has no end mark: it is complete when the file has grown and then stayed unchanged for a short time.
        size, quiet_s, waited_s = before, 0.0, 0.0
        while waited_s < STACK_DUMP_TIMEOUT_S and (size == before or quiet_s < STACK_DUMP_QUIET_S):
            await asyncio.sleep(POLL_S)
            now = path.stat().st_size if path.exists() else 0
            waited_s, quiet_s = waited_s + POLL_S, quiet_s + POLL_S if now == size else 0.0
            size = now
        if size == before:
            return ""
        with path.open("rb") as dump:
            dump.seek(before)
            return dump.read(_MOST_STACKS_BYTES).decode(errors="replace")

    def kill(self) -> None:
        """End the process and everything that it started."""
        self._child.kill()

    async def gone(self) -> None:
        """Wait until the process has ended."""
        await asyncio.wait({self._ending})  # A cancelled caller does not cancel this task.

    async def close(self, reading: asyncio.Task[None]) -> None:
        """Let the connection go, once the process has ended; `reading` reads from it."""
        # The connection breaks when the process is gone, also if only the end of the fork server says that it is.
        await asyncio.wait({reading}, timeout=LINE_BREAKS_WITHIN_S)
        reading.cancel()
        self.writer.close()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
