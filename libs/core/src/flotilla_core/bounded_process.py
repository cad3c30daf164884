"""A child process that does, within hard bounds, what a file or a program of strangers could overdo.

The caller names a function of ours, `package.module:function`. A child imports it, answers one question after the other
with what the function returns, and ends by itself when nobody asks for a while. Questions and answers are JSON. A
thread asks with `ask`, an event loop with `ask_beside`.

Invariants: no question takes more memory, time of a processor, or bytes of answer than its `Bounds` say. A child that
passes them is killed and its question gets `OutOfBounds`; the next question gets a new child. The bounds are the
kernel's, set before the function's module is imported: the address space (which holds for every allocator, where a
limit within a library would not), a timer of processor time for each question, and the size of files that it writes.
A child never outlives its parent, even one that is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_core.errors import FlotillaError, Internal, error_of
from flotilla_core.findings import parts_of

Function = Callable[[dict[str, Any]], Any]

WALL_PER_CPU = 10
"""A question may take this many times its limit of processor time, where others use the processors."""
LEAST_WALL_S = 60.0
IDLE_S = 60.0
"""A child that nobody asks for so long ends."""
MOST_QUESTION_BYTES = 1 << 30
MOST_BYTES_BESIDE = 1 << 20
"""A larger question goes by a thread, which waits for its bytes."""
_OUT_OF_MEMORY = 70
"""The exit code of a child that was refused memory."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Bounds:
    """Says what a child may take."""

    memory_bytes: int
    """The limit of its address space: with the interpreter and its libraries, which take about 100 MiB."""
    cpu_s: float
    """Time of a processor for one question."""
    answer_bytes: int = 16 << 20
    file_bytes: int = 0
    """The size of a file that it writes."""


class OutOfBounds(Exception):
    """A child passed its bounds, or ended; the text says how, for the `why` of an error."""


class BoundedProcess:
    """Asks a function of a child, which is started when it is needed; threads wait for each other."""

    def __init__(self, function: str, bounds: Bounds) -> None:
        self._function = function
        self._bounds = bounds
        self._one_at_a_time = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child with all that it started."""
        if self._child is not None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # It has ended, or has no group of its own yet.
            self._child.kill()
            self._child.wait()
            self._child = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, question: dict[str, Any]) -> Any:
        """Return the function's answer, or raise its FlotillaError, or OutOfBounds."""
        frame = _frame(question)
        if len(frame) > MOST_QUESTION_BYTES:
            raise OutOfBounds(f"it is larger than {_mib(MOST_QUESTION_BYTES)}")
        with self._one_at_a_time:
            answer = self._answer(frame)
            if answer is None:  # The child had ended for lack of questions when this one came.
                answer = self._answer(frame)
        return _read(answer)

    async def ask_beside(self, question: dict[str, Any]) -> Any:
        """Return or raise what `ask` does, while the event loop runs.

        A child that lives and answers nobody is asked from the loop itself: a thread costs more than a short answer,
        and waits for the interpreter while the loop is busy.
        """
        frame = _frame(question)
        lives = self._socket is not None and self._child is not None and self._child.poll() is None
        if lives and len(frame) <= MOST_BYTES_BESIDE and self._one_at_a_time.acquire(blocking=False):
            try:
                answer = await self._answer_beside(frame)
            finally:
                self._one_at_a_time.release()
            if answer is not None:
                return _read(answer)
        return await asyncio.to_thread(self.ask, question)

    def _answer(self, frame: bytes) -> dict[str, Any] | None:
        """Return what the child says; None where it ended by itself before it read the question."""
        channel = self._channel()
        wall_s = max(LEAST_WALL_S, self._bounds.cpu_s * WALL_PER_CPU)
        deadline = time.monotonic() + wall_s
        found: dict[str, Any] | None = None
        try:
            channel.settimeout(wall_s)
            channel.sendall(frame)
            length = int.from_bytes(_received(channel, _LENGTH_BYTES, deadline), "little")
            if length > self._bounds.answer_bytes:
                raise OutOfBounds(f"the result is larger than {_mib(self._bounds.answer_bytes)}")
            found = json.loads(_received(channel, length, deadline))
        except TimeoutError:
            raise OutOfBounds(f"it took more than {wall_s:g} s") from None
        except (OSError, EOFError, ValueError):
            self._tell_end()
        finally:
            if found is None:  # What was half read belongs to no further question.
                self.close()
        return found

    async def _answer_beside(self, frame: bytes) -> dict[str, Any] | None:
        """Return what the child says; None where that has to be asked again, to say what is wrong."""
        loop, channel = asyncio.get_running_loop(), self._socket
        assert channel is not None
        channel.setblocking(False)
        found: dict[str, Any] | None = None
        told = bytearray()
        try:
            async with asyncio.timeout(max(LEAST_WALL_S, self._bounds.cpu_s * WALL_PER_CPU)):
                await loop.sock_sendall(channel, frame)
                length = self._bounds.answer_bytes
                while len(told) < _LENGTH_BYTES + length:
                    if not (part := await loop.sock_recv(channel, 1 << 16)):
                        return None
                    told += part
                    if len(told) >= _LENGTH_BYTES:
                        length = int.from_bytes(told[:_LENGTH_BYTES], "little")
                        if length > self._bounds.answer_bytes:
                            return None
            found = json.loads(told[_LENGTH_BYTES:])
        except (OSError, TimeoutError, ValueError):
            return None
        finally:
            if found is None:  # What was half read belongs to no further question.
                self.close()
        return found

    def _tell_end(self) -> None:
        """Raise the reason why the child has ended, unless it ended by itself."""
        code = self._wait()
        if code == 0:
            return
        bounds = self._bounds
        if code == _OUT_OF_MEMORY:
            raise OutOfBounds(f"it needs more than {_mib(bounds.memory_bytes)} of memory")
        if code == -signal.SIGPROF:
            raise OutOfBounds(f"it needs more than {bounds.cpu_s:g} s of a processor")
        if code == -signal.SIGABRT:  # Libraries abort where they are refused memory.
            raise OutOfBounds(
                f"its process gave up, as it does where {_mib(bounds.memory_bytes)} of memory do not suffice"
            )
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise OutOfBounds(f"its process ended {how}")

    def _wait(self) -> int:
        """Return the exit code of a child whose channel has closed."""
        assert self._child is not None
        try:
            return self._child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _channel(self) -> socket.socket:
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._socket is None:
            ours, theirs = socket.socketpair()
            try:
                self._child = _starter().submit(self._start, theirs).result()
            except OSError as error:
                ours.close()
                raise OutOfBounds(f"its process cannot be started: {error.strerror or error}") from None
            finally:
                theirs.close()
            self._socket = ours
        return self._socket

    def _start(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        bounds = [str(value) for value in astuple(self._bounds)]
        return subprocess.Popen(
            # -P: nothing in the working directory is imported.
            [sys.executable, "-P", "-m", __name__, self._function, str(os.getpid()), str(channel.fileno()), *bounds],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )  # fmt: skip


_ENVIRONMENT = {
    # Each thread reserves address space, and each arena too. Pools of pyarrow's own reserve more than they use.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    # What goes by the order of a set of texts is the same each time.
    "PYTHONHASHSEED": "0",
}


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts children: they die with the thread that started them, and it stays."""
    return ThreadPoolExecutor(1, thread_name_prefix="bounded-process")


def _read(answer: dict[str, Any] | None) -> Any:
    """Return the function's answer, or raise its error."""
    if answer is None:
        raise OutOfBounds("its process ended without an answer")
    if (error := answer.get("error")) is not None:
        raise error_of(Finding(**error))
    return answer["answer"]


def _mib(count: int) -> str:
    return f"{count >> 20:,} MiB"


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _received(channel: socket.socket, count: int, deadline: float) -> bytes:
    """Return exactly this many bytes."""
    parts = bytearray()
    while len(parts) < count:
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := channel.recv(min(count - len(parts), 1 << 20))):
            raise EOFError
        parts += part
    return bytes(parts)


def main() -> int:
    """Answer questions, within the bounds that the command line names."""
    name, parent, descriptor, memory, cpu, _, file = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return 1  # It died before prctl took effect.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(file), int(file)))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    channel = socket.socket(fileno=int(descriptor))
    try:
        signal.setitimer(signal.ITIMER_PROF, float(cpu))
        module, _, function = name.partition(":")
        return _serve(channel, getattr(importlib.import_module(module), function), float(cpu))
    except MemoryError:
        return _OUT_OF_MEMORY


def _serve(channel: socket.socket, function: Function, cpu_s: float) -> int:
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.settimeout(IDLE_S)
        try:
            length = int.from_bytes(_received(channel, _LENGTH_BYTES, time.monotonic() + IDLE_S), "little")
        except (TimeoutError, EOFError):
            return 0
        question = json.loads(_received(channel, length, time.monotonic() + IDLE_S))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        frame = _frame(_told(function, question))
        channel.settimeout(None)
        channel.sendall(frame)


def _told(function: Function, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, or the error in its place."""
    try:
        return {"answer": function(question)}
    except MemoryError:
        raise
    except FlotillaError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever a library of the child raises is its answer
        failure = Internal(
            "a process within bounds failed", why=f"{type(error).__name__}: {str(error)[:1000]}"
        )
    return {"error": parts_of(failure.finding())}


if __name__ == "__main__":
    # Leave at once: memory may not suffice for an orderly end, and nothing is left to write.
    os._exit(main())
