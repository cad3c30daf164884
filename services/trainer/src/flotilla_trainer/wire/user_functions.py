"""Advantages and losses of the user's, written path.py:function: loaded, guarded and checked.

Invariant: whatever is wrong with a file or comes out of it becomes one typed error that names the function.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flotilla_core.errors import FlotillaError, NotFound, UserCodeError


def is_user_function(name: str) -> bool:
    """Return whether a name means a function in a file; names of ours have no colon."""
    return ":" in name


def check_user_function(name: str) -> None:
    """Refuse a file that is not there or does not define the function, without running it."""
    path, function = _parts(name)
    try:
        tree = ast.parse(path.read_text("utf-8"), filename=str(path))
    except OSError as error:
        raise NotFound("the file cannot be read", where=name, why=error.strerror or str(error)) from error
    except (SyntaxError, ValueError) as error:
        raise UserCodeError("the file is not Python", where=name, why=str(error)) from error
    names = [name for node in tree.body for name in _bound_by(node)]
    if function not in names:
        raise UserCodeError(
            f"the file defines no function {function}",
            where=name,
            why=f"it defines {', '.join(names) or 'none'}",
        )


def load_user_function(name: str) -> Callable[..., Any]:
    """The function, from its file as it is now."""
    check_user_function(name)
    path, function = _parts(name)
    spec = importlib.util.spec_from_file_location(f"flotilla_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserCodeError("the file is not Python", where=name, next_step="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    run = spec.loader.exec_module
    guarded(name, lambda: run(module))
    loaded: Callable[..., Any] = getattr(module, function)
    return loaded


def guarded(name: str, call: Callable[[], Any]) -> Any:
    """The result of a call into code of the user's; a process that it forked ends here."""
    started_as = os.getpid()
    try:
        return call()
    # Code of the user's may raise anything.
    except Exception as error:
        raise UserCodeError(
            f"{type(error).__name__} in code of yours",
            where=name,
            # The text of an exception of the user's may raise in its turn.
            why=str(traceback.TracebackException.from_exception(error)),
            next_step="call the function by hand with a small input",
        ) from error
    finally:
        if os.getpid() != started_as:
            os._exit(0)


def _bound_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _parts(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    return Path(file), function


def problem(name: str, parameters: dict[str, Any]) -> str:
    """Return why a function cannot be called with these parameters; a plan asks in a process of its own."""
    try:
        function = load_user_function(name)
    except FlotillaError as error:
        return str(error)
    if not callable(function):
        return f"{name} is not a function but {type(function).__name__}"
    signature = inspect.signature(function)
    try:
        signature.bind(object(), **parameters)
    except TypeError as error:
        return f"{name}{signature} cannot be called with one argument and {sorted(parameters)}: {error}"
    return ""
