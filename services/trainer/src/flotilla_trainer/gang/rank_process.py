"""One rank as the front sees it, on this host or on another one: its commands, its answers and its last beat.

Invariants: an answer that will never come fails when the rank ends; nothing here waits for a rank without a limit.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_core.errors import FlotillaError, error_of
from flotilla_trainer.gang.local_rank import LocalRank
from flotilla_trainer.gang.remote_rank import RemoteRank
from flotilla_trainer.wire.frames import PREFIX_BYTES, Array, Frame, decode, encode, lengths


class RankProcess:
    """A rank with its connection."""

    def __init__(self, rank: int, process: LocalRank | RemoteRank) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._reports: dict[int, asyncio.Future[Frame]] = {}
        self.rank = rank
        self.process = process
        self.last_beat = time.monotonic()
        self.progress = 0
        self.phase = "starting"
        self.ended_at = float("inf")
        self._judged = False
        self._reading = asyncio.create_task(self._read(process.reader), name=f"rank-{rank}-reader")
        self._ending = asyncio.create_task(self._note_end(), name=f"rank-{rank}-end")

    @property
    def name(self) -> str:
        """The name of the rank in messages to users."""
        host = f", host {self.process.where}" if self.process.where else ""
        return f"rank {self.rank} (pid {self.process.pid}{host})"

    async def command(self, kind: str, fields: dict[str, Any], arrays: dict[str, Array]) -> Frame:
        """Send one command and return its answer; a refusal is raised."""
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(Frame(kind, number, fields, arrays))
            await self.process.writer.drain()
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

    async def leave(self) -> None:
        """Ask the process to end by itself, and wait until it has."""
        self._send(Frame("leave"))
        await asyncio.wait({self._ending})

    async def reaped(self) -> None:
        """Wait until the killed process has ended."""
        await asyncio.wait({self._ending})  # A cancelled caller does not cancel this task.
        await self.process.close(self._reading)

    def _send(self, frame: Frame) -> None:
        """Write a frame; one to a process that is gone is dropped, and the watch finds out why it is."""
        # A writer of Python 3.12 raises TypeError once its connection is lost.
        if not self.process.writer.is_closing():
            self.process.writer.writelines(encode(frame))

    async def _note_end(self) -> None:
        await self.process.gone()
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
            answer.set_exception(error_of(Finding(**frame.fields)))
        else:
            answer.set_result(frame)
