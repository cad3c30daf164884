"""The front's side of the fork server, a process that has imported torch and forks each rank. Free of torch itself.

Invariants: the import is paid once, so a gang that replaces a lost one starts at once; the fork server dies with the
front, and its ranks with it; a lost fork server is replaced with the next rank; nothing here waits without a limit. The
fork server reports how a rank ended; if its line ends without a report, it died and its ranks were killed with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from flotilla_core.errors import DeadlineExceeded, RankFailed

BORN, ENDED = "born", "ended"


class ForkReply:
    """Reads what the fork server reports about one rank: lines of a word and a number."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> tuple[str, int]:
        """Return the next line; the word is empty once the other end is closed."""
        line = (await self._reader.readline()).split()
        return (line[0].decode(), int(line[1])) if len(line) == 2 else ("", 0)

    def close(self) -> None:
        """Stop reading."""
        self._writer.close()


class RankChild:
    """One forked rank; it leads a process group of its own."""

    def __init__(self, pid: int, reply: ForkReply) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit status: None while the process lives, minus the signal where a signal ended it."""
        self._reply = reply

    async def wait(self) -> None:
        """Wait until the process has ended; only one caller may wait."""
        word, status = await self._reply.next()
        self.returncode = status if word == ENDED else -signal.SIGKILL
        self._reply.close()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process alone; raise ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End the process and everything that it started."""
        if self.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # The process ended between the two lines.


@dataclass(frozen=True)
class RankOrder:
    """The settings of one rank that the fork server applies before the first command."""

    name: str
    """The name of the process that the system shows."""
    stacks: str
    """The file that the rank writes its stacks to on SIGUSR1."""
    environment: dict[str, str]


class RankForkServer:
    """Forks ranks for any number of gangs."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    async def rank(self, order: RankOrder, line: socket.socket, log: IO[bytes], limit_s: float) -> RankChild:
        """Start a new rank at the other end of `line`; its output goes to `log`."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        request = json.dumps(asdict(order)).encode()
        with theirs:
            descriptors = [line.fileno(), log.fileno(), theirs.fileno()]
            try:
                socket.send_fds(self._open_line(), [request], descriptors)
            except OSError as error:
                ours.close()
                raise self._failed(f"the fork server is gone: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        reply = ForkReply(reader, writer)
        try:
            word, number = await asyncio.wait_for(reply.next(), limit_s)
        except TimeoutError:
            reply.close()
            self.close()  # The next rank must not wait for the same fork server.
            raise DeadlineExceeded(
                "a rank did not start",
                where=str(self._log),
                why=f"torch and transformers were not imported within {limit_s:g} s",
                next_step="see the log",
            ) from None
        if word != BORN:
            reply.close()
            raise self._failed(
                f"the first one ended with status {number}" if word else "the fork server ended"
            )
        return RankChild(number, reply)

    def close(self) -> None:
        """End the fork server; ranks that still live die with it."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _failed(self, why: str) -> RankFailed:
        return RankFailed(
            "the ranks cannot be started",
            where=str(self._log),
            why=why,
            next_step="the end of that log says more",
        )

    def _open_line(self) -> socket.socket:
        if self._line is not None and self._process is not None and self._process.poll() is None:
            return self._line
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flotilla_trainer.rank"),
                    *("--descriptor", str(theirs.fileno())),
                    *("--front", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,
            )
        self._line = ours
        return ours
