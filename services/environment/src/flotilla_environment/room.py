"""The inside of a room: what runs commands, keeps files and starts servers, as the first of the processes in its jail.

Invariants: everything that is started here is bounded in time or ends with the room, and what it says is bounded. Its
children get no descriptor of this process. They may kill it, which ends the room, but they cannot look into it or write
to it. Only the standard library is imported here.
"""

from __future__ import annotations

import base64
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from flotilla_environment.program import bounded
from flotilla_workers.functions import Refusal, Target

PR_SET_DUMPABLE = 4
MOST_LINE_BYTES = 384 * 1024
"""The longest line of a server that speaks by its standard output."""
TAIL_BYTES = 4_000
LOOK_S = 0.02
"""The time between two looks whether a server listens, or a process has ended."""
ROUNDS = 100


def load(_: Target) -> Callable[[dict[str, Any]], Any]:
    """Return what answers the questions of the service about this room."""
    # What runs here as the same user could otherwise open the memory of this process.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    os.umask(0o022)
    return Inside().answer


class Tail:
    """The end of what a process prints."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), 1 << 16):
            self._kept = (self._kept + part)[-TAIL_BYTES:]

    def of_ended(self) -> str:
        """Return it, where the process has ended."""
        self._thread.join(1.0)  # Its children may have the stream still.
        return self._kept.decode(errors="replace").strip()


class Inside:
    """The processes and files in the room."""

    def __init__(self) -> None:
        self._link: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._tail: Tail | None = None
        self._heard = b""
        self._can: dict[str, Callable[..., Any]] = {
            "link": self._take_link,
            "socket": self._give_socket,
            "run": _run,
            "alone": _end_others,
            "write": _write,
            "read": _read,
            "empty": _empty,
            "serve": self._serve,
            "serving": self._serving,
            "talk": self._talk,
            "exchange": self._exchange,
        }

    def answer(self, question: dict[str, Any]) -> Any:
        return self._can[question.pop("do")](**question)

    def _take_link(self, descriptor: int) -> None:
        self._link = socket.socket(fileno=descriptor)
        self._link.set_inheritable(False)

    def _give_socket(self) -> None:
        """Send a socket of the network of this room, by which the service reaches a server here."""
        assert self._link is not None
        with socket.socket() as given:
            socket.send_fds(self._link, [b"s"], [given.fileno()])

    def _start(self, command: list[str], environment: Mapping[str, str], **streams: Any) -> None:
        try:
            self._child = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                start_new_session=True,
                **streams,
            )
        except OSError as error:
            raise Refusal(
                f"{command[0]} does not start: {error.strerror}. A jail shows what "
                "environment.isolation.readable of the stack names"
            ) from None
        told = self._child.stderr or self._child.stdout
        assert told is not None
        self._tail, self._heard = Tail(told), b""

    def _ended(self) -> str:
        """Return how the server ended, and what it said last."""
        assert self._child is not None and self._tail is not None
        code = self._child.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"{how}\n{self._tail.of_ended()}".strip()

    def _serve(self, command: list[str], environment: dict[str, str], limit_s: float) -> dict[str, Any]:
        """Start a server; return its port once it listens, or how it ended."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        filled = [part.replace("{port}", str(port)) for part in command]
        self._start(
            filled, environment | {"PORT": str(port)}, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        assert self._child is not None
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self._child.poll() is not None:
                return {"ended": self._ended()}
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return {"port": port}
            time.sleep(LOOK_S)
        return {"ended": f"did not listen on port {port} within {limit_s:g} s"}

    def _serving(self, port: int) -> dict[str, Any]:
        """Say whether the server takes connections: one that ends may still be a process."""
        assert self._child is not None
        if self._child.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return {"serves": True}
        return {"serves": False}

    def _talk(self, command: list[str], environment: dict[str, str]) -> None:
        """Start a server that is spoken to by its standard input; one that was there before ends."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._start(command, environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE)

    def _exchange(self, line: str, limit_s: float, wants: bool) -> dict[str, Any]:
        """Say a line; where one is wanted return the next line of the server, or how it ended."""
        assert self._child is not None and self._child.stdin is not None and self._child.stdout is not None
        until = time.monotonic() + limit_s
        try:
            if line:
                self._child.stdin.write(line.encode() + b"\n")
                self._child.stdin.flush()
        except OSError:
            return {"ended": self._ended()}
        while wants and b"\n" not in self._heard:
            if len(self._heard) > MOST_LINE_BYTES:
                return {"ended": f"said a line of more than {MOST_LINE_BYTES:,} bytes"}
            ready = select.select([self._child.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                return {"late": True}
            part = os.read(self._child.stdout.fileno(), 1 << 16)
            if not part:
                return {"ended": self._ended()}
            self._heard += part
        if not wants:
            return {}
        said, _, self._heard = self._heard.partition(b"\n")
        return {"line": said.decode(errors="replace")}


def _run(command: list[str], folder: str, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run a command; return its exit code and what it printed. What it leaves in the background goes on."""
    with open(os.memfd_create("printed"), "w+b") as printed:
        try:
            child = subprocess.Popen(
                command,
                cwd=folder if os.path.isdir(folder) else "/",
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        except OSError as error:  # Too many processes, or too little memory.
            return {"code": error.errno, "text": f"error: the command does not start: {error.strerror}"}
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
        return {"code": code, "text": bounded(printed).rstrip("\n")}


def _end_others() -> None:
    """End every other process in the room; only a jail with a table of processes of its own may ask for it."""
    for _ in range(ROUNDS):  # One that forks without end may have been faster.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not [*_others()]:
            return
        time.sleep(LOOK_S)
    raise Refusal("the processes of the room do not end")


def _others() -> Iterator[str]:
    """Give the processes that live, beside this one and the first one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    yield name


def _empty(folder: str) -> None:
    """Remove all that is in a folder, and make it where it is not there."""
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _write(path: str, data: str, mode: int, afresh: bool) -> None:
    """Write a part of a file, at its start or behind what is there."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb" if afresh else "ab") as opened:
        opened.write(base64.b64decode(data))
    file.chmod(mode)


def _read(path: str, most: int) -> dict[str, Any]:
    """Return the text of a file; None where there is none."""
    if not os.path.isfile(path):
        return {"text": None}
    with open(path, "rb") as opened:
        return {"text": opened.read(most).decode(errors="replace")}
