"""The service's side of one worker: start it, ask it, kill it.

Invariants: one question at a time. An answer is taken only where it begins with the secret of its question and nothing
follows it. After anything else, a timeout, a cancellation or a broken channel the worker is killed together with
everything that it started, by its keeper, so a late answer can never be taken for another question's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any, Protocol, TypeVar

from flotilla_core.errors import Unavailable, unicode_text
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.subprocess_group import signal_child
from flotilla_workers import frames, keeper
from flotilla_workers.fork import signal_name
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, Cell
from flotilla_workers.jail.level import Level

START_LIMIT_S = 60.0
LOAD_LIMIT_S = 60.0
"""The time for imports of a user's module, or of a large library; not counted as an answer's."""
EXIT_LIMIT_S = keeper.KILL_LIMIT_S + 5.0
MOST_SENT_BYTES = 32 << 10
"""The bytes of several questions that a channel takes whole, while the worker still answers the first one."""
LOG = "/proc/self/fd/2"

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Failure:
    """The answer where the code in the worker raised or refused, or the worker died."""

    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Timeout:
    """The limit passed; the worker was killed."""

    limit_s: float


class Keeper(Protocol):
    """The process that ends a worker and all that it started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def signal(self, number: signal.Signals) -> None: ...


class OwnKeeper:
    """A keeper that this process started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        signal_child(self._process, number)


class WorkerProcess:
    """One running worker with its keeper."""

    def __init__(self, keeper: Keeper, channel: socket.socket, cell: Cell) -> None:
        self._keeper = keeper
        self._channel = channel
        self._cell = cell
        self._heard = bytearray()
        """The bytes that came by the channel and are not taken yet."""
        self.loaded: dict[str, str] = {}
        """The texts that the worker told of the targets that it loaded, by their keys."""
        self.pid = 0
        """Process id of the worker, once it has begun; of its keeper where the jail numbers processes itself."""
        self.spent = False
        """True where the worker found what an answer left, and could not remove it: it is to be ended."""
        self._identity: ProcessIdentity | None = None

    @classmethod
    async def start(cls, loader: str, cell: Cell | None = None) -> WorkerProcess:
        """Start a worker that loads by `package.module:function`, in a jail where it is given one."""
        cell = cell or Cell(NO_JAIL)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = log_of_service()
        with ExitStack() as theirs_alone, ExitStack() as where_it_fails:
            theirs_alone.callback(theirs.close)
            if log >= 0:
                theirs_alone.callback(os.close, log)
            where_it_fails.callback(ours.close)
            # Only installed packages: nothing in the current folder can pose as one of them.
            command = [
                sys.executable,
                "-P",
                "-m",
                "flotilla_workers.worker",
                loader,
                json.dumps(cell.preload),
            ]
            with cell.start(command) as start:
                process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-I",
                        "-S",
                        keeper.__file__,
                        str(theirs.fileno()),
                        ":".join(cell.groups),
                    ),
                    *start.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=start.environment,
                    pass_fds=(theirs.fileno(), *start.descriptors),
                    start_new_session=True,
                )
            where_it_fails.pop_all()
        worker = cls(OwnKeeper(process), ours, cell)
        await worker.begin()
        return worker

    async def begin(self) -> None:
        """Wait for its first sign of life."""
        begun = await self._ask({"do": "begin"}, START_LIMIT_S, "started", lambda said: int(said["pid"]))
        if not isinstance(begun, int):
            raise Unavailable(
                "a worker did not start",
                where=f"pid {self._keeper.pid}",
                why=begun.message
                if isinstance(begun, Failure)
                else f"no sign of life within {START_LIMIT_S:g} s",
                next_step="Read the log of its service.",
            )
        self.pid = self._keeper.pid if self._cell.level is Level.NAMESPACES else begun
        if isinstance(self._keeper, OwnKeeper):
            self._identity = ProcessIdentity.of(self.pid)

    @property
    def in_vain(self) -> bool:
        """Whether no keeper was ever there: who was to fork it did not."""
        return self._keeper.pid == 0

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

    async def load(self, target: Target) -> Failure | None:
        """Return why the target does not load; without an answer of the worker's it is dead."""
        if target.key in self.loaded:
            return None
        outcome = await self._ask(
            {"do": "load", "key": target.key, "target": target._asdict()},
            LOAD_LIMIT_S,
            "loaded",
            lambda said: _text(said["loaded"]) if "loaded" in said else self._failure(said),
        )
        if isinstance(outcome, Timeout):
            return Failure(f"did not finish loading within {LOAD_LIMIT_S:g} s")
        if isinstance(outcome, Failure):
            return outcome
        self.loaded[target.key] = outcome
        return None

    async def ask(
        self, target: Target, question: Any, limit_s: float, read: Callable[[Any], AnswerT]
    ) -> AnswerT | Failure | Timeout:
        """Return what `read` makes of the value that the loaded target gave; without an answer the worker is dead.

        `read` raises `NoAnswer` where no honest worker says that.
        """
        outcomes: list[AnswerT | Failure | Timeout] = []
        await self.ask_all(target, [question], limit_s, read, lambda outcome, _: outcomes.append(outcome))
        return outcomes[0]

    async def ask_all(
        self,
        target: Target,
        questions: Sequence[Any],
        limit_s: float,
        read: Callable[[Any], AnswerT],
        take: Callable[[AnswerT | Failure | Timeout, float], None],
    ) -> None:
        """Ask one question after the other; `take` gets what comes of each, and the seconds since the one before it.

        They are sent together, as many as a channel takes, and the limit is that of each. The first one without an
        answer is the last that is taken.
        """
        key, now = target.key, asyncio.get_running_loop().time
        asked, secrets = b"", list[bytes]()
        for question in questions:
            secret = token_bytes(frames.SECRET_BYTES)
            frame = frames.encode(secret, {"do": "answer", "key": key, "question": question})
            if secrets and len(asked) + len(frame) > MOST_SENT_BYTES:
                break
            secrets.append(secret)
            asked += frame
        for secret in secrets:
            began = now()
            outcome = await self._exchange(
                asked,
                secret,
                limit_s,
                "answered",
                lambda said: read(said["value"]) if "value" in said else self._failure(said),
                secret is secrets[-1],
            )
            take(outcome, now() - began)
            if self._keeper.returncode is not None or self._channel.fileno() < 0:
                return
            asked = b""

    async def _ask(
        self, question: dict[str, Any], limit_s: float, did: str, read: Callable[[dict[str, Any]], AnswerT]
    ) -> AnswerT | Failure | Timeout:
        secret = token_bytes(frames.SECRET_BYTES)
        return await self._exchange(frames.encode(secret, question), secret, limit_s, did, read, True)

    async def _exchange(
        self,
        asked: bytes,
        secret: bytes,
        limit_s: float,
        did: str,
        read: Callable[[dict[str, Any]], AnswerT],
        is_last: bool,
    ) -> AnswerT | Failure | Timeout:
        """Send what is asked, and return what `read` makes of the answer with this secret."""
        try:
            body = self._answer_to(secret, is_last) if not asked else None
            if body is None:
                async with asyncio.timeout(limit_s):
                    body = await self._told(asked, secret, is_last)
            said = frames.decode_answer(body)
            self.spent |= "spent" in said
            return read(said)
        except frames.NoAnswer as error:
            await self.kill()
            return Failure(
                f"the worker was killed while it {did}: what came from it is no answer to its question, because "
                f"{error}. The code in it, or something that this started, wrote to a descriptor that is not its own"
            )
        except (EOFError, ConnectionError):
            return Failure(f"the worker {await self.kill()} while it {did}")
        except TimeoutError:
            await self.kill()
            return Timeout(limit_s)
        except asyncio.CancelledError:
            await self.kill()
            raise

    async def _told(self, asked: bytes, secret: bytes, is_last: bool) -> bytes:
        loop = asyncio.get_running_loop()
        if asked:
            await loop.sock_sendall(self._channel, asked)
        while (body := self._answer_to(secret, is_last)) is None:
            part = await loop.sock_recv(self._channel, frames.AT_ONCE)
            if not part:
                raise EOFError("the worker closed its channel")
            self._heard += part
        return body

    def _answer_to(self, secret: bytes, is_last: bool) -> bytes | None:
        """Return the object of the answer to the question with this secret, where all of it is there."""
        if len(self._heard) < frames.HEAD.size:
            return None
        ends = frames.HEAD.size + frames.length_of_answer(self._heard[: frames.HEAD.size], secret)
        if len(self._heard) < ends:
            return None
        body = bytes(self._heard[frames.HEAD.size : ends])
        del self._heard[:ends]
        if is_last and (self._heard or self._said()):
            raise frames.NoAnswer("more bytes follow it")
        return body

    async def kill(self) -> str:
        """End the worker and all that it started; says how it ended."""
        # The keeper sees that the channel ends, even where it was stopped by user code. Who waits for an answer sees it
        # too, and before the descriptor is free for another socket.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._keeper.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                code = await self._keeper.wait()
        except TimeoutError:
            self._keeper.signal(signal.SIGKILL)
            code = await self._ended_at_last()
        finally:
            self._channel.close()
            self._end_group()
            if self._cell.level is Level.NAMESPACES:
                self._cell.close()
            else:
                # Its folder may have a million files.
                await asyncio.to_thread(self._cell.close)
        return f"was ended by {signal_name(-code)}" if code < 0 else f"exited with status {code}"

    async def _ended_at_last(self) -> int:
        # A process that the kernel holds is left behind.
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                return await self._keeper.wait()
        return -signal.SIGKILL

    def _failure(self, said: dict[str, Any]) -> Failure:
        message, traceback = _text(said.get("failed")), _text(said.get("traceback", ""))
        match said.get("system"):
            case [int(number), str(path)]:
                message += self._cell.way_out(number, path)
        match said.get("variable"):
            case str(name):
                message += self._cell.way_to_variable(name)
        return Failure(message, traceback)

    def _end_group(self) -> None:
        """Kill what the worker started in its group: user code can kill the keeper, which does this otherwise."""
        # Long after its end the number may be another process's. Nobody in its jail ends a keeper that was forked.
        if (
            isinstance(self._keeper, OwnKeeper)
            and self.pid
            and ProcessIdentity.of(self.pid) in (None, self._identity)
        ):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise frames.NoAnswer("it is neither a value nor a failure")
    return unicode_text(said)


def log_of_service() -> int:
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
