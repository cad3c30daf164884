"""One worker: a process that loads rewards and scores samples until it is killed or its service goes away.

Run as `python -m flotilla_reward.worker CHANNEL_FD PARENT_PID`. It holds no state that the service needs:
whatever happens here, from an endless loop to a crash, costs one sample and one restart. Three questions: `begin`,
`load` a target and `score` a sample by a loaded target. Only the process that was started answers: a process that user
code forked and that comes back here ends. Standard output is the service's standard error, so that prints of user code
end in its log. What user code raises is told with the line of the user's file that it came from, and its traceback
shows no frame of ours.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import os
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flotilla_reward import frames
from flotilla_reward.job import CannotScore, Failure, Sample, Target, Unreadable, judge

PR_SET_PDEATHSIG = 1
LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 16_000

OURS = str(Path(__file__).parent)
NOT_THE_USERS = (OURS, "<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Beginnings of file names whose code no user wrote for a run."""

WRAP_ASYNC = """import asyncio

def reward(prompt, response, answer, info):
    return asyncio.run({function}(prompt=prompt, response=response, answer=answer, info=info))"""
WRAP_TRL = """def reward(prompt, response, answer, info):
    columns = {{name: [value] for name, value in info.items()}}
    return {function}(prompts=[prompt], completions=[response], answer=[answer], **columns)[0]"""
WRAP_VERL = """def reward(prompt, response, answer, info):
    result = {function}(info.get("data_source"), response, answer, info.get("extra_info"))
    return result["score"] if isinstance(result, dict) else result"""

Score = Callable[[Sample], object]


class CannotLoad(Exception):
    """A target is not usable; the message says why."""


def load(target: Target) -> Score:
    """Return the callable behind a target."""
    if target.kind == "builtin":
        # Workers that run a function of the user's start faster without it.
        from flotilla_reward.builtin import BUILTIN

        builtin = BUILTIN[target.source](**target.parameters)
        builtin.prepare()
        return builtin.score
    function = _user_function(target)
    if not callable(function):
        raise CannotLoad(f"{target.function} is not a function but {type(function).__name__}")
    call: Callable[..., object] = function
    if inspect.iscoroutinefunction(call):
        raise CannotLoad(
            f"{target.function} is an async function, which nothing awaits here. Name a function like this one "
            f"instead:\n{WRAP_ASYNC.format(function=target.function)}"
        )
    expected = {"prompt": "", "response": "", "answer": "", "info": {}, **target.parameters}
    try:
        inspect.signature(call).bind(**expected)
    except TypeError as error:
        raise CannotLoad(
            f"{target.function}{inspect.signature(call)} cannot be called with "
            f"({', '.join(f'{name}=' for name in expected)}): {error}{_way_for(target.function, call)}"
        ) from error

    def score(sample: Sample) -> object:
        return call(**sample._asdict(), **target.parameters)

    return score


def _way_for(name: str, call: Callable[..., object]) -> str:
    """Return what to write for a function that was made for another program; empty for any other."""
    names = inspect.signature(call).parameters
    for mark, program, wrapper in (("completions", "TRL", WRAP_TRL), ("solution_str", "verl", WRAP_VERL)):
        if mark in names:
            instead = wrapper.format(function=name)
            return f".\nIt is written for {program}. Name a function like this one instead:\n{instead}"
    return ""


def _user_function(target: Target) -> object:
    if target.kind == "entry_point":
        module = importlib.import_module(target.source)
    else:
        module = _import_file(Path(target.source))
    found: object = module
    for part in target.function.split("."):
        if not hasattr(found, part):
            names = sorted(name for name in vars(module) if not name.startswith("_"))
            raise CannotLoad(
                f"{target.source} has no {target.function}; it has {', '.join(names) or 'nothing'}"
            )
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> Any:
    # Modules next to the file can be imported from it, but never hide one of ours or of the standard library.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"flotilla_user_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def answer(request: dict[str, Any], loaded: dict[str, Score]) -> dict[str, Any]:
    """Return the reply to one request; user code may raise anything."""
    try:
        if request["do"] == "begin":
            return {"pid": os.getpid()}
        if request["do"] == "load":
            target = Target(**request["target"])
            loaded[target.key] = load(target)
            return {"loaded": target.key}
        verdict = judge(loaded[request["key"]](Sample(**request["sample"])))
        return {"failed": verdict.message} if isinstance(verdict, Failure) else {"value": verdict.value}
    except Unreadable:
        return {"value": 0.0, "unreadable": True}
    except (CannotLoad, CannotScore) as error:
        return {"failed": str(error)}
    except BaseException as error:  # noqa: BLE001 - the boundary between user code and the service
        return _describe(error)


def _describe(error: BaseException) -> dict[str, Any]:
    told = traceback.TracebackException.from_exception(error)
    trimmed: traceback.TracebackException | None = told
    while trimmed is not None:
        trimmed.stack = traceback.StackSummary.from_list(_users_frames(trimmed.stack))
        trimmed = trimmed.__cause__ or trimmed.__context__
    # The text of an exception of the user's may raise in its turn; `told` has its text, or says that.
    message = f"{type(error).__name__}: {told}" if str(told) else type(error).__name__
    if told.stack:
        last = told.stack[-1]
        message = f"{last.filename}:{last.lineno} in {last.name}: {message}"
    return {"failed": message[:LONGEST_MESSAGE], "traceback": "".join(told.format())[-LONGEST_TRACEBACK:]}


def _users_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames of the user's files; of a reward that is an installed package, all that are not ours."""
    users = [frame for frame in stack if not frame.filename.startswith(NOT_THE_USERS)]
    return users or [frame for frame in stack if not frame.filename.startswith((OURS, "<frozen "))]


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the reward service went away before its worker started")


def serve(connection: socket.socket) -> None:
    """Answer questions until the service goes away."""
    # User code may replace what it finds in modules, but not these.
    process_id, leave = os.getpid, os._exit
    started_as = process_id()
    loaded: dict[str, Score] = {}
    while True:
        secret, request = frames.receive_question(connection)
        reply = answer(request, loaded)
        if process_id() != started_as:
            leave(0)  # A process that user code forked, with a copy of the secret: the answer is not its.
        connection.sendall(frames.encode(secret, reply))


def main() -> None:
    channel, parent = map(int, sys.argv[1:])
    _die_with(parent)
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
