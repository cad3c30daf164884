"""The service's side of one worker: start it, ask it, kill it.

Invariants: one question at a time. An answer is taken only where it begins with the secret of its question and nothing
follows it. After anything else, a timeout, a cancellation or a broken channel the worker is killed together with
everything that it started, by its keeper, so a late answer can never be taken for another sample's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from flotilla_core.errors import Unavailable, unicode_text
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.subprocess_group import signal_child
from flotilla_reward import frames, keeper
from flotilla_reward.job import Failure, Sample, Target, Value, judge

START_LIMIT_S = 60.0
EXIT_LIMIT_S = keeper.KILL_LIMIT_S + 5.0
LOG = "/proc/self/fd/2"


class WorkerDied(Exception):
    """The worker ended in the middle of a question, or was killed for what it said."""

    def __init__(self, how: str, why: str = "") -> None:
        super().__init__(how)
        self.how = how
        self.why = why
        """The reason why it ended; empty where how it ended says all."""

    def while_it(self, did: str) -> str:
        """Return the whole sentence."""
        return f"the worker {self.how} while it {did}" + (f": {self.why}" if self.why else "")


class WorkerProcess:
    """One running worker with its keeper."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self._keeper = process
        self._channel = channel
        self._loaded: set[str] = set()
        self.pid = 0
        """Process id of the worker itself, once it has begun."""
        self._identity: ProcessIdentity | None = None

    @classmethod
    async def start(cls) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = _log()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())),
                # Only installed packages: nothing in the current folder can pose as one of them.
                *(sys.executable, "-P", "-m", "flotilla_reward.worker"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
            if log >= 0:
                os.close(log)
        worker = cls(process, ours)
        try:
            begun = await worker._ask({"do": "begin"}, START_LIMIT_S)
        except (WorkerDied, TimeoutError) as error:
            raise Unavailable(
                "a reward worker did not start",
                where=f"pid {process.pid}",
                why=str(error) or f"no sign of life within {START_LIMIT_S:g} s",
                next_step="Read the log of the reward service.",
            ) from error
        worker.pid = int(begun["pid"])
        worker._identity = ProcessIdentity.of(worker.pid)
        return worker

    @property
    def alive(self) -> bool:
        return self._keeper.returncode is None and self._said() is not None

    @property
    def quiet(self) -> bool:
        """Whether it lives and has said nothing since its last answer."""
        return self._keeper.returncode is None and self._said() is False

    def _said(self) -> bool | None:
        """Return whether bytes wait in the channel; None where the channel has closed."""
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK)) or None
        except BlockingIOError:
            return False
        except OSError:
            return None

    async def load(self, target: Target, limit_s: float) -> Failure | None:
        """Return why the target does not load; raise `TimeoutError` or `WorkerDied`, and then the worker is dead."""
        if target.key in self._loaded:
            return None
        answer = await self._ask({"do": "load", "target": target.to_json()}, limit_s)
        if "loaded" not in answer:
            return await self._failure(answer)
        self._loaded.add(target.key)
        return None

    async def score(self, target: Target, sample: Sample, limit_s: float) -> Value | Failure:
        """Return what the reward gave; raise `TimeoutError` or `WorkerDied`, and then the worker is dead."""
        answer = await self._ask({"do": "score", "key": target.key, "sample": sample._asdict()}, limit_s)
        value = answer.get("value")
        if not isinstance(value, int | float):
            return await self._failure(answer)
        # No code of a user's says of its own responses what built-in rewards say.
        unreadable = target.kind == "builtin" and answer.get("unreadable") is True
        return Value(0.0, unreadable=True) if unreadable else judge(value)

    async def _failure(self, answer: dict[str, Any]) -> Failure:
        message, traceback = answer.get("failed"), answer.get("traceback", "")
        if not isinstance(message, str) or not isinstance(traceback, str):
            await self.kill()
            raise WorkerDied("was killed", "it gave neither a value nor a failure")
        return Failure(unicode_text(message), unicode_text(traceback))

    async def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        secret = frames.new_secret()
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.get_running_loop().sock_sendall(self._channel, frames.encode(secret, question))
                length = frames.length_of_answer(await self._read(frames.HEAD.size), secret)
                body = await self._read(length)
            if self._said():
                raise frames.NoAnswer("more bytes follow it")
            return frames.decode_answer(body)
        except frames.NoAnswer as error:
            await self.kill()
            raise WorkerDied(
                "was killed",
                f"what came from it is no answer to its question, because {error}. The reward, or something that it "
                "started, wrote to a descriptor that is not its own",
            ) from error
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(await self.kill()) from error
        except (TimeoutError, asyncio.CancelledError):
            await self.kill()
            raise

    async def _read(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < count:
            part = await loop.sock_recv(self._channel, count - len(parts))
            if not part:
                raise EOFError("the worker closed its channel")
            parts += part
        return bytes(parts)

    async def kill(self) -> str:
        """End the worker and all that it started; says how it ended."""
        # The keeper sees that the channel ends, even where it was stopped by user code. Who waits for an answer sees it
        # too, and before the descriptor is free for another socket.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        signal_child(self._keeper, signal.SIGCONT)
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                code = await self._keeper.wait()
        except TimeoutError:
            signal_child(self._keeper, signal.SIGKILL)
            code = await self._keeper.wait()
        finally:
            self._channel.close()
            self._end_group()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def _end_group(self) -> None:
        """Kill what the worker started in its group: user code can kill the keeper, which does this otherwise."""
        # Long after its end the number may be another process's.
        if self.pid and ProcessIdentity.of(self.pid) in (None, self._identity):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _log() -> int:
    """Return a descriptor for what workers print, into the log of the service.

    It is opened anew where that is possible, for user code can change the modes of a descriptor for all who share it.
    """
    if not sys.stderr:
        return asyncio.subprocess.DEVNULL
    try:
        # A pipe that nobody reads refuses, and does not wait.
        log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return os.dup(2)
    os.set_blocking(log, True)
    return log
