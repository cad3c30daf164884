"""One rank as the front sees it: its process, its connection and its last beat.

Invariants: the process leads a process group of its own and is killed with it; an answer that will never come fails
when the rank ends; nothing here waits for a rank without a limit.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import time
from typing import Any

from flotilla_core.errors import BY_REASON, FlotillaError, Internal
from flotilla_trainer.gang.fork_server import RankChild, RankForkServer, RankOrder
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.wire.frames import PREFIX_BYTES, Array, Frame, decode, encode, lengths

STACK_DUMP_TIMEOUT_S = 5.0
STACK_DUMP_QUIET_S = 0.25
POLL_S = 0.05
LINE_BREAKS_WITHIN_S = 2.0


class RankProcess:
    """A rank, forked by the fork server."""

    def __init__(self, plan: GangPlan, rank: int) -> None:
        self._plan = plan
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._reports: dict[int, asyncio.Future[Frame]] = {}
        self._log_start = 0
        self.rank = rank
        self.last_beat = time.monotonic()
        self.progress = 0
        self.phase = "starting"
        self.ended_at = float("inf")
        self._judged = False
        self.process: RankChild

    @property
    def name(self) -> str:
        """The name of the rank in messages to users."""
        return f"rank {self.rank} (pid {self.process.pid})"

    async def start(self, fork_server: RankForkServer) -> None:
        """Fork the process and open the connection."""
        ours, theirs = socket.socketpair()
        log_path = self._plan.log_path(self.rank)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log_path.open("ab") as log:
            self._log_start = log.tell()
            order = RankOrder(
                f"rank-{self.rank} {self._plan.name}",
                str(self._plan.stacks_path(self.rank)),
                self._plan.environment(),
            )
            self.process = await fork_server.rank(order, theirs, log, self._plan.slow_timeout_s)
        self.last_beat = time.monotonic()
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader), name=f"rank-{self.rank}-reader")
        self._ending = asyncio.create_task(self._note_end(), name=f"rank-{self.rank}-end")

    async def command(self, kind: str, fields: dict[str, Any], arrays: dict[str, Array]) -> Frame:
        """Send one command and return its answer; a refusal is raised."""
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(Frame(kind, number, fields, arrays))
            await self._writer.drain()
            return await answer
        except ConnectionError:
            return await answer
        finally:
            self._answers.pop(number, None)

    def report(self, number: int) -> asyncio.Future[Frame]:
        """Return the future report `number` of this rank, about work that continues after its command was answered."""
        report: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._reports[number] = report
        report.add_done_callback(lambda _: self._reports.pop(number, None))
        return report

    def judge(self) -> None:
        """Ignore all later answers: the gang is lost, even if this rank is woken once more to write its stacks."""
        self._judged = True

    def fail_answers(self, error: FlotillaError) -> None:
        """Fail every answer and report that a caller still waits for."""
        for answer in (*self._answers.values(), *self._reports.values()):
            if not answer.done():
                answer.set_exception(error.again())

    @property
    def waits_for_answer(self) -> bool:
        """Return whether this rank has yet to answer the running command."""
        return bool(self._answers)

    def ended(self) -> str:
        """Describe how the process ended; empty while it lives."""
        code = self.process.returncode
        if code is None:
            return ""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP or a debugger."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False

    def last_log_line(self) -> str:
        """Return the last line that this process wrote, which names the error of a rank that failed."""
        try:
            with self._plan.log_path(self.rank).open("rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").rstrip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    async def stacks(self, *, wake: bool = False) -> str:
        """Return the stacks of all its threads; `wake` continues a stopped process so that it can write them."""
        if self.is_stopped() and not wake:
            return ""
        path = self._plan.stacks_path(self.rank)
        before = path.stat().st_size if path.exists() else 0
        try:
            self.process.send_signal(signal.SIGUSR1)
            if wake:
                self.process.send_signal(signal.SIGCONT)
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
            return dump.read().decode(errors="replace")

    async def leave(self) -> None:
        """Ask the process to end by itself, and wait until it has."""
        self._send(Frame("leave"))
        await asyncio.wait({self._ending})

    def kill(self) -> None:
        """End the process and everything that it started."""
        self.process.kill()

    async def reaped(self) -> None:
        """Wait until the killed process has ended."""
        await asyncio.wait({self._ending})  # A cancelled caller does not cancel this task.
        # The connection breaks when the process is gone, also if only the end of the fork server says that it is.
        await asyncio.wait({self._reading}, timeout=LINE_BREAKS_WITHIN_S)
        self._reading.cancel()
        self._writer.close()

    def _send(self, frame: Frame) -> None:
        """Write a frame; one to a process that is gone is dropped, and the watch finds out why it is."""
        # A writer of Python 3.12 raises TypeError once its connection is lost.
        if not self._writer.is_closing():
            self._writer.writelines(encode(frame))

    async def _note_end(self) -> None:
        await self.process.wait()
        self.ended_at = time.monotonic()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read beats and answers until the connection breaks; the watch finds out why it broke."""
        try:
            while True:
                header_bytes, body_bytes = lengths(await reader.readexactly(PREFIX_BYTES))
                header = await reader.readexactly(header_bytes)
                self._take(decode(header, await reader.readexactly(body_bytes)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _take(self, frame: Frame) -> None:
        self.last_beat = time.monotonic()
        if frame.kind == "beat":
            self.progress = frame.fields["progress"]
            self.phase = frame.fields["phase"]
            return
        answer = self._answers.get(frame.number) or self._reports.get(frame.number)
        if answer is None or answer.done() or self._judged:
            return
        if frame.kind == "refused":
            answer.set_exception(_refusal(frame.fields))
        else:
            answer.set_result(frame)


def _refusal(fields: dict[str, Any]) -> FlotillaError:
    kind = BY_REASON.get(fields["reason"], Internal)
    return kind(fields["what"], where=fields["where"], why=fields["why"], next_step=fields["next_step"])
