"""`flotilla` as a process of its own for each command, without a second of imports for each.

A server imports the command line once and forks for every command. A fork has its own arguments, environment, folder,
output and end, as a command has that a shell starts. It takes nothing apart at its end that dies with it, which would
take as long as most commands. The server ends with the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from flotilla_core.config import RunConfig, StackConfig

MAIN = "flotilla_cli.main"
RUNS_ON_DISK = "flotilla_coordinator.views.stored"
"""The module that commands import in a function, where no fleet answers."""
_REQUEST_BYTES = 1 << 18


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float, folder: Path | None = None
) -> tuple[int, str, str]:
    """Return the exit code, the output and the messages of `flotilla` with these arguments, run in `folder`."""
    place = str((folder or Path()).absolute())
    asked = {"arguments": list(arguments), "environment": dict(environment), "folder": place}
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with theirs:
            files = [out.fileno(), err.fileno(), theirs.fileno()]
            requests, _ = _server()
            socket.send_fds(requests, [json.dumps(asked).encode()], files)
        ours.settimeout(timeout_s)
        told = ours.makefile()
        pid = int(told.readline())
        try:
            # A command that was killed says nothing of its end.
            code = int(told.read() or -signal.SIGKILL)
        except TimeoutError as late:
            os.kill(pid, signal.SIGKILL)
            ours.settimeout(None)
            ours.recv(1)  # The line ends with the process.
            raise subprocess.TimeoutExpired(["flotilla", *arguments], timeout_s) from late
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return code, texts[0], texts[1]


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as it; it.serve()"], stdin=theirs.fileno()
        )
    return ours, server


def serve() -> None:
    """Fork for each request that comes, until nobody can ask any more."""
    import_module(MAIN).load_commands()
    import_module(RUNS_ON_DISK)
    for read_by_most in (StackConfig, RunConfig):
        read_by_most.model_rebuild()
    gc.freeze()
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Nobody waits for the forks: each tells its own end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _obey(json.loads(request), *files)
        for file in files:
            os.close(file)


def _obey(asked: dict[str, Any], out: int, err: int, line: int) -> NoReturn:
    """Run one command to its end, which is that of the process."""
    for file, place in ((out, 1), (err, 2)):
        os.dup2(file, place)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["flotilla", *asked["arguments"]]
    os.write(line, f"{os.getpid()}\n".encode())
    code: object = 1  # An error that nobody caught ends Python with it, after its traceback.
    try:
        import_module(MAIN).main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        # What Python does at its end: pools of threads are told to end, and then waited for.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # The line itself closes when the process has ended.
        os.write(line, str(code if isinstance(code, int) else 1).encode())
    os._exit(0)
