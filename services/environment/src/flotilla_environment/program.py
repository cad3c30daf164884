"""A program of the policy's, in the process of a jail that is its own.

Invariant: nothing that it prints or raises is more than text for the policy, and that text is bounded. The program may
do what it likes with this process, so its service believes no more of an answer than its form. Only the standard
library is imported here.
"""

from __future__ import annotations

import ast
import linecache
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import IO, Any

from flotilla_workers.functions import Target

FILE = "program.py"
MOST_HALF_BYTES = 2_000
"""The length of the beginning, and of the end, of a text that is too long for the policy."""


class _OutOfTime(BaseException):
    """The time of the program is over."""


def load(_: Target) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what runs a program."""
    return run


def run(question: dict[str, Any]) -> dict[str, Any]:
    """Return what a program printed, and its error behind that."""
    code, limit_s = question["code"], question["limit_s"]
    with tempfile.TemporaryFile() as printed:
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - the program closes it, or its end
        error = _error_of(code, limit_s)
        with suppress(Exception):  # The program may have closed it, or filled its folder.
            sys.stdout.flush()
        text = "\n".join(part for part in (bounded(printed).rstrip("\n"), error) if part)
    return {"text": text or "nothing was printed", "failed": bool(error)}


def _error_of(code: str, limit_s: float) -> str:
    """Run a program; return its error, and nothing where there is none."""
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)

    def stop(*_: object) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        _execute(code)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTime as late:
        lines = [frame.lineno for frame in traceback.extract_tb(late.__traceback__) if frame.filename == FILE]
        at = f", and was at line {lines[-1]}" if lines else ""
        return f"error: the program took longer than {limit_s:g} s{at}"
    except SystemExit as left:
        return "" if left.code in (None, 0) else f"error: the program ended with {left.code!r:.200}"
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        return _told(error)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return ""


def _execute(code: str) -> None:
    """Run a program as the main module; the value of an expression at its end is printed, as at a prompt."""
    tree = ast.parse(code, FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    module = ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [FILE]
    exec(compile(tree, FILE, "exec", dont_inherit=True), module.__dict__)
    if isinstance(last, ast.Expr):
        shown = compile(ast.Expression(last.value), FILE, "eval", dont_inherit=True)
        value = eval(shown, module.__dict__)  # noqa: S307 - what the jail is for
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _told(error: BaseException) -> str:
    try:
        told = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in told.stack if frame.filename == FILE]
        text = f"{type(error).__name__}: {told}".removesuffix(": ")
        lines = [*told.format_exception_only()][:-1] if isinstance(error, SyntaxError) else []
        where = "".join(lines) or (f"line {frames[-1].lineno}: {frames[-1].line}\n" if frames else "")
        return f"error: {where}{text}"[: 2 * MOST_HALF_BYTES]
    except BaseException:  # noqa: BLE001 - the text of an exception may raise in its turn
        return f"error: {type(error).__name__}"


def bounded(printed: IO[bytes]) -> str:
    """Return what was printed: all of it, or its beginning and its end."""
    length = printed.seek(0, os.SEEK_END)
    printed.seek(0)
    if length <= 2 * MOST_HALF_BYTES:
        return printed.read().decode(errors="replace")
    first = printed.read(MOST_HALF_BYTES).decode(errors="replace")
    printed.seek(-MOST_HALF_BYTES, os.SEEK_END)
    last = printed.read(MOST_HALF_BYTES).decode(errors="replace")
    return f"{first}\n[{length - 2 * MOST_HALF_BYTES:,} bytes are left out]\n{last}"
