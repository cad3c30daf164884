"""The code that a worker loads: code of the service itself, or a function of a user's file or package.

Invariants: a target is plain data and travels as JSON; two targets with equal keys behave alike, so a worker loads
each once. A file that changed on disk is another target. What code of users raises is told with the line of the user's
file that it came from, and its traceback shows no frame of ours. Nothing heavy is imported here: workers start with
this.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import traceback

LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 16_000


class _Target(NamedTuple):
    kind: Literal["builtin", "file", "entry_point"]
    """Code of the service itself, or of a user."""
    source: str
    """Name of the built-in, absolute path of the file, or module of the entry point."""
    function: str = ""
    """Name within the file or module."""
    parameters: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    stamp: str = ""
    """State of the file when the target was made."""
    trusted: bool = False
    """True where the run vouches for the code: no jail is needed."""


class Target(_Target):
    """The code that answers questions in a worker, with its parameters."""

    @cached_property
    def key(self) -> str:
        # The service makes keys. A worker is told them: the library of digests would be a third of a cold verdict.
        import hashlib

        text = json.dumps(self._asdict(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Refusal(Exception):
    """A target that is not usable, or a question without an answer; the message says all, so no traceback is told."""


def user_function(target: Target) -> Callable[..., Any]:
    """Return the function of a user that the target names; its module is imported."""
    imported = importlib.import_module if target.kind == "entry_point" else _import_file
    module = imported(target.source)
    found: Any = module
    for part in target.function.split("."):
        if not hasattr(found, part):
            names = sorted(name for name, one in vars(module).items() if _is_defined(one, module))
            raise Refusal(f"{target.source} has no {target.function}; it has {', '.join(names) or 'nothing'}")
        found = getattr(found, part)
    if not callable(found):
        raise Refusal(f"{target.function} is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _is_defined(found: Any, module: Any) -> bool:
    """Return whether a module defines this function or class itself, under a name that is not private."""
    own = callable(found) and getattr(found, "__module__", None) == module.__name__
    return own and not getattr(found, "__name__", "_").startswith("_")


def _import_file(path: str) -> Any:
    # Modules next to the file can be imported from it, but never hide one of ours or of the standard library.
    folder, file = os.path.split(path)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"flotilla_user_{os.path.splitext(file)[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refusal(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def described(error: BaseException, ours: tuple[str, ...]) -> dict[str, Any]:
    """Return what a worker says of an exception; `ours` are folders with code that no user wrote."""
    # Most workers never need it.
    import traceback

    told = traceback.TracebackException.from_exception(error)
    trimmed: traceback.TracebackException | None = told
    while trimmed is not None:
        users, others = _frames(trimmed.stack, ours)
        # Of what a library raised on the way, the last frame alone says where.
        trimmed.stack = traceback.StackSummary.from_list(
            users or (others if trimmed is told else others[-1:])
        )
        trimmed = trimmed.__cause__ or trimmed.__context__
    # The text of an exception of the user's may raise in its turn; `told` has its text, or says that.
    message = f"{type(error).__name__}: {told}" if str(told) else type(error).__name__
    if told.stack:
        last = told.stack[-1]
        message = f"{last.filename}:{last.lineno} in {last.name}: {message}"
    said: dict[str, Any] = {
        "failed": message[:LONGEST_MESSAGE],
        "traceback": "".join(told.format())[-LONGEST_TRACEBACK:],
    }
    if (of_system := _of_system(error)) is not None:
        said["system"] = of_system
    if name := _missing_variable(error):
        said["variable"] = name[:LONGEST_MESSAGE]
    return said


def _of_system(error: BaseException) -> list[Any] | None:
    """Return number and path of the system's error that an exception is, or that it wraps, as HTTP clients do."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and not any(found is one for one in seen):
        seen.append(found)
        if isinstance(found, MemoryError):
            return [errno.ENOMEM, ""]
        if isinstance(found, OSError) and type(found.errno) is int:
            path = found.filename if type(found.filename) is str else ""
            return [found.errno, path[:LONGEST_MESSAGE]]
        # `URLError` has it there and names no cause.
        reason = vars(found).get("reason")
        found = reason if isinstance(reason, BaseException) else found.__cause__ or found.__context__
    return None


def _missing_variable(error: BaseException) -> str:
    """Return the variable of the environment that an exception says is missing; empty where it says no such thing."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    of_environment = last is not None and last.tb_frame.f_code is type(os.environ).__getitem__.__code__
    return error.args[0] if of_environment and error.args and type(error.args[0]) is str else ""


def _frames(
    stack: traceback.StackSummary, ours: tuple[str, ...]
) -> tuple[list[traceback.FrameSummary], list[traceback.FrameSummary]]:
    """Return the frames of the user's files, and those of installed packages with them; none of ours."""
    import sysconfig

    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = [frame for frame in stack if not frame.filename.startswith((*ours, "<frozen "))]
    return [frame for frame in others if not frame.filename.startswith((*libraries,))], others
