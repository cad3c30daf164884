"""The code that a worker loads: code of the service itself, or a function of a user's file or package.

Invariants: a target is plain data and travels as JSON; two targets with equal keys behave alike, so a worker loads
each once. A file that changed on disk is another target. What code of users raises is told with the line of the user's
file that it came from, and its traceback shows no frame of ours. Nothing heavy is imported here: workers start with
this.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 16_000

LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Beginnings of file names whose code no user wrote for a run."""


@dataclass(frozen=True)
class Target:
    """The code that answers questions in a worker, with its parameters."""

    kind: Literal["builtin", "file", "entry_point"]
    """Code of the service itself, or of a user."""
    source: str
    """Name of the built-in, absolute path of the file, or module of the entry point."""
    function: str = ""
    """Name within the file or module."""
    parameters: dict[str, Any] = field(default_factory=dict)
    stamp: str = ""
    """State of the file when the target was made."""
    trusted: bool = False
    """Its run vouches for it: it needs no jail."""

    @cached_property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Refusal(Exception):
    """A target that is not usable, or a question without an answer; the message says all, so no traceback is told."""


def user_function(target: Target) -> Callable[..., Any]:
    """Return the function of a user that the target names; its module is imported."""
    if target.kind == "entry_point":
        module = importlib.import_module(target.source)
    else:
        module = _import_file(Path(target.source))
    found: Any = module
    for part in target.function.split("."):
        if not hasattr(found, part):
            names = sorted(name for name in vars(module) if not name.startswith("_"))
            raise Refusal(f"{target.source} has no {target.function}; it has {', '.join(names) or 'nothing'}")
        found = getattr(found, part)
    if not callable(found):
        raise Refusal(f"{target.function} is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _import_file(path: Path) -> Any:
    # Modules next to the file can be imported from it, but never hide one of ours or of the standard library.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"flotilla_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refusal(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def described(error: BaseException, ours: tuple[str, ...]) -> dict[str, Any]:
    """Return what a worker says of an exception; `ours` are folders with code that no user wrote."""
    told = traceback.TracebackException.from_exception(error)
    trimmed: traceback.TracebackException | None = told
    while trimmed is not None:
        trimmed.stack = traceback.StackSummary.from_list(_users_frames(trimmed.stack, ours))
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
    if isinstance(error, OSError) and type(error.errno) is int:
        path = error.filename if type(error.filename) is str else ""
        said["system"] = [error.errno, path[:LONGEST_MESSAGE]]
    return said


def _users_frames(stack: traceback.StackSummary, ours: tuple[str, ...]) -> list[traceback.FrameSummary]:
    """Return the frames of the user's files; of code in an installed package, all that are not ours."""
    users = [frame for frame in stack if not frame.filename.startswith((*ours, *LIBRARIES))]
    return users or [frame for frame in stack if not frame.filename.startswith((*ours, "<frozen "))]
