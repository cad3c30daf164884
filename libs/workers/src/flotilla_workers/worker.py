"""One worker: a process that loads code and answers questions until it is killed or its service goes away.

Run as `python -m flotilla_workers.worker LOADER PRELOAD CHANNEL_FD PARENT_PID`. The loader is a function of the
service, `package.module:function`. It makes of a target what gives a JSON value for a question, and either may raise
`Refusal`. A text `told` of what it makes says how the target is used. PRELOAD is `null`, or a JSON list of modules to
import: then each answer has a process of its own.

A worker holds no state that the service needs: whatever happens here, from an endless loop to a crash, costs one answer
and one restart. Three questions: `begin`, `load` a target and `answer` by a loaded target. Only the process that was
started answers: a process that user code forked and that comes back here ends. Standard output is the service's
standard error, so that prints of user code end in its log.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flotilla_workers import frames
from flotilla_workers.functions import Refusal, Target, described

if TYPE_CHECKING:
    from flotilla_workers.fork import Forks

PR_SET_PDEATHSIG = 1

Answers = Callable[[Any], Any]
Loader = Callable[[Target], Answers]
"""A function, not another thing that can be called."""


def answer(request: dict[str, Any], load: Loader, loaded: dict[str, Answers]) -> dict[str, Any]:
    """Return the reply to one request; user code may raise anything."""
    try:
        if request["do"] == "begin":
            return {"pid": os.getpid()}
        if request["do"] == "load":
            loaded[request["key"]] = answers = load(Target(**request["target"]))
            return {"loaded": getattr(answers, "told", "")}
        return {"value": loaded[request["key"]](request["question"])}
    except Refusal as error:
        return {"failed": str(error)}
    except BaseException as error:  # noqa: BLE001 - the boundary between user code and the service
        return described(error, tuple(map(os.path.dirname, (__file__, load.__code__.co_filename))))


def serve(connection: socket.socket, load: Loader, forks: Forks | None) -> None:
    """Answer questions until the service goes away."""
    # User code may replace what it finds in modules, but not these.
    process_id, leave = os.getpid, os._exit
    started_as = process_id()
    loaded: dict[str, Answers] = {}
    questions = frames.Questions(connection)
    while True:
        secret, request = questions.next()
        if forks is not None and request["do"] == "answer":
            reply = forks.answered(partial(answer, request, load, loaded))
        else:
            reply = answer(request, load, loaded)
        if process_id() != started_as:
            leave(0)  # A process that user code forked, with a copy of the secret: the answer is not its.
        connection.sendall(frames.encode(secret, reply))


def main() -> None:
    loader, preload, channel, parent = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:])
    if os.getppid() != 1:
        _end_with(parent)
    # Else the first process of a jail is 1 for those in it, and none of them outlives it.
    module, _, name = loader.partition(":")
    answer_until_gone(channel, getattr(importlib.import_module(module), name), preload)


def answer_until_gone(channel: int, load: Loader, preload: Sequence[str] | None) -> None:
    """Answer questions until the service goes away, each in a process of its own where there is a list of modules."""
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    try:
        serve(connection, load, None if preload is None else _forks(preload))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with(parent: int) -> None:
    # A worker in a jail of the higher level starts faster without it.
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the service went away before its worker started")


def _forks(preload: Sequence[str]) -> Forks:
    # Only workers that fork need it.
    from flotilla_workers.fork import Forks

    return Forks(preload)


if __name__ == "__main__":
    main()
