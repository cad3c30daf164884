"""What another user of the machine tries on a stack that runs.

Run as that user: it reads from stdin what there is to try (`Targets` as JSON), tries all of it, and writes what it did
(`Findings` as JSON). Invariant: it knows no more than anybody can find out, and addresses, paths and process ids.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flotilla_core.config import BindConfig
from flotilla_core.trust.authority import make_credential

KNOCK_TIMEOUT_S = 5
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a connection that makes calls."""


@dataclass
class Targets:
    """What there is to try."""

    paths: list[str]
    """Files and folders, as the owner sees them."""
    pids: list[int]
    addresses: list[str]
    """Of services."""
    sockets: list[str]
    """Unix sockets."""


@dataclass
class Findings:
    """What came of it."""

    gained: list[str] = field(default_factory=list)
    """Everything that should not have worked."""
    refused: Counter[str] = field(default_factory=Counter)
    """How often each kind of attempt was refused."""


def main() -> None:
    """Try everything."""
    targets, found = Targets(**json.load(sys.stdin)), Findings()
    for path in targets.paths:
        _attempt(found, "read", path, partial(_read, Path(path)))
        _attempt(found, "write", path, partial(_write, path))
    for pid in targets.pids:
        for name in ("environ", "maps", "mem"):
            file = f"/proc/{pid}/{name}"
            _attempt(found, "read process", file, partial(_read, Path(file)))
        _attempt(found, "list open files", str(pid), partial(os.listdir, f"/proc/{pid}/fd"))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
            _attempt(found, "signal", f"{pid} {number.name}", partial(os.kill, pid, number))
    with tempfile.TemporaryDirectory() as folder:
        own = make_credential(BindConfig(), Path(folder)).path
        for address in targets.addresses:
            for shown in (None, own):
                _attempt(found, "knock", address, partial(_knock, address, shown))
    for path in targets.sockets:
        _attempt(found, "connect to socket", path, partial(_connect, path))
    json.dump(vars(found), sys.stdout)


def _attempt(found: Findings, kind: str, what: str, act: Callable[[], object]) -> None:
    """Nothing but a refusal for want of permission counts as one."""
    try:
        act()
    except PermissionError:
        found.refused[kind] += 1
    except (FileNotFoundError, ProcessLookupError):
        pass  # It ended meanwhile.
    else:
        found.gained.append(f"{kind}: {what}")


def _read(path: Path) -> None:
    if path.is_dir():
        os.listdir(path)
    else:
        path.read_bytes()


def _write(path: str) -> None:
    if Path(path).is_dir():
        Path(path, "stranger").touch()
    else:
        os.close(os.open(path, os.O_WRONLY))


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)


def _unverified(shown: Path | None) -> ssl.SSLContext:
    """Return what believes any server, and shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        context.load_cert_chain(shown)
    return context


def _knock(address: str, shown: Path | None) -> None:
    """Begin to make calls; a server that takes them answers with settings of its own."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), KNOCK_TIMEOUT_S) as line,
            _unverified(shown).wrap_socket(line) as door,
        ):
            door.sendall(_HTTP2)
            answer = door.recv(1)
    except (ssl.SSLError, ConnectionError):
        answer = b""
    if not answer:
        raise PermissionError(address)


if __name__ == "__main__":
    main()
