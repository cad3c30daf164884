"""The processes in the jails of the verifier `code`: the program of a response, and tests that are code.

Both are workers that load by a function of this module. Invariants: the jail of the program holds no expected result
and no test; what it says is a value or an output, which is compared elsewhere. The jail of the tests holds no code of
the response, and no name that the program gives hides a builtin or a name of the tests. Only the standard library is
imported here, and pytest where a row has tests for it.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from flotilla_reward.verifiers.remote import ROOT, Peer, text_of
from flotilla_workers.functions import Target

MOST_ERRORS_BYTES = 4096
LAST_ERRORS_S = 0.2
LONGEST_LINE = 120
MOST_OUTPUT_BYTES = 700 * 1024
"""The longest output of a program in one test; an answer of a worker has room for it."""
COLLECTED = ("test", "Test", "pytest", "setup", "teardown")
"""Beginnings of names by which pytest would take something of the program for a test, or for an order."""

OF_CODE, OF_SCRIPT, OF_PYTEST = "tests", "__main__", "test_of_row"
"""Names of the modules that tests are; a script may do its work only where it is the main one."""

Answers = Callable[[dict[str, Any]], dict[str, Any]]


def program(target: Target) -> Answers:
    """Return what does with the program of a response what a question says."""
    _keep_quiet()
    return Program(**target.parameters)


def checks(target: Target) -> Answers:
    """Return what runs the tests of a row, whose `solution` is the program in the other jail."""
    _keep_quiet()
    return Checks(**target.parameters)


def _keep_quiet() -> None:
    """Print nothing into the log of the service, and find the commands of this Python first."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"


def _folder() -> Path:
    """Make a folder from which modules are imported, and go there."""
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    return folder


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")


class Program:
    """The program of a response: run by a command, or loaded as a module whose functions are called."""

    def __init__(self, source: str, file: str) -> None:
        self._file = file
        self._folder = _folder()
        _write(self._folder, {file: source})
        self._module = ModuleOfProgram(source, self._folder / file)
        self._serves: threading.Thread | None = None

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        if "find" in question:
            return {"missing": [first for one in question["find"] if (first := _not_there(one))]}
        if "command" in question:
            _write(self._folder, question["files"])
            command = question["command"]
            shell = command if isinstance(command, str) else shlex.join(command or ())
            # Python itself gets the signal that has it say where it is.
            by_default = [sys.executable, "-X", "faulthandler", self._file]
            started = ["/bin/sh", "-c", shell] if command else by_default
            return self._run(started, question["input"], question["limit_s"])
        if self._serves is None:
            self._serves = threading.Thread(target=self._module.serve, daemon=True)
            self._serves.start()
        limit_s = question.pop("limit_s")
        said = self._module.answer(question, limit_s)
        if said is None:
            frame = sys._current_frames().get(self._serves.ident or 0)
            return {"late": _place_in(frame, str(self._folder / self._file))}
        return said

    def _run(self, command: list[str], text: str, limit_s: float) -> dict[str, Any]:
        """Return the status and the output of a command, or where it is when its time is over."""
        # Files, because a process that the program leaves behind may hold a pipe open.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(text.encode(errors="surrogatepass"))
            given.seek(0)
            run = subprocess.Popen(command, stdin=given, stdout=printed, stderr=subprocess.PIPE)
            errors = Errors(run.stderr)
            try:
                run.wait(limit_s)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGABRT)  # Python says then where it is.
                lines = re.findall(
                    rf'{re.escape(self._file)}", line ([0-9]+)', errors.told().decode("latin-1")
                )
                return {"late": f"{self._file} line {lines[0]}" if lines else ""}
            printed.seek(0)
            output = printed.read(MOST_OUTPUT_BYTES + 1)
        said: dict[str, Any] = {"status": run.returncode, "errors": b64encode(errors.told()).decode()}
        if len(output) > MOST_OUTPUT_BYTES:
            return said | {"output": None}
        return said | {"output": b64encode(output).decode()}


class Errors:
    """The end of what a command prints as its errors."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._end = stream, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while read := os.read(self._stream.fileno(), 1 << 16):
            self._end = (self._end + read)[-MOST_ERRORS_BYTES:]

    def told(self) -> bytes:
        """Return it when the command has ended, also where a process that it left behind keeps the pipe."""
        self._reader.join(LAST_ERRORS_S)
        return self._end


def _place_in(frame: FrameType | None, file: str) -> str:
    """Return the line of a file that runs in these frames; nothing where none does."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return "" if frame is None else f"{Path(file).name} line {frame.f_lineno}"


def _not_there(command: str | list[str]) -> str:
    """Return the name of a command that this host lacks; nothing where it has it."""
    first = shlex.split(command)[0] if isinstance(command, str) else command[0]
    known = ["/bin/sh", "-c", f"command -v -- {shlex.quote(first)}"]
    return first if subprocess.run(known, stdout=subprocess.DEVNULL, check=False).returncode else ""


class ModuleOfProgram(Peer):
    """The program as a module; what it raises when it is loaded is raised by every use."""

    def __init__(self, source: str, path: Path) -> None:
        self._source, self._path = source, path
        self._module = ModuleType(path.stem)
        self._module.__file__ = str(path)
        self._error: BaseException | None = None
        self._loaded = False
        super().__init__(self._module, shows=None)

    def _do(self, operation: str, of: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if not self._loaded:
            self._loaded = True
            sys.modules[self._module.__name__] = self._module
            try:
                exec(compile(self._source, self._path, "exec"), vars(self._module))
            except BaseException as error:  # noqa: BLE001 - a program may raise anything
                self._error = error
        if self._error is not None:
            raise self._error
        if operation == "names":
            return [name for name in vars(self._module) if not name.startswith("_")]
        if operation == "named":
            name, *arguments = arguments
            return self._found(name)(*arguments, **keywords)
        return super()._do(operation, of, arguments, keywords)

    def _found(self, name: str) -> Any:
        """Return a function by its name, or the method of a class `Solution`."""
        found: Any = self._module
        if not hasattr(found, name.partition(".")[0]) and hasattr(found, "Solution"):
            found = found.Solution()
        for part in name.split("."):
            found = getattr(found, part)
        return found


class ProgramForTests(ModuleType):
    """The module that tests import; what is in it is in the other jail."""

    def __init__(self, name: str, peer: Peer, hides: Callable[[str], bool]) -> None:
        super().__init__(name)
        self._peer, self._hides = peer, hides

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            names = self._peer.ask("names", ROOT)
            return [one for one in names if not self._hides(one)]
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("get", ROOT, name)


class Checks(Peer):
    """Tests that are code.

    It says `total`, then for each test whether it is `passed`, then that it is `over`; or that the tests are `broken`.
    """

    def __init__(self, kind: str, source: str, entry_point: str, module: str, first: int) -> None:
        super().__init__(shows=(OF_CODE, OF_SCRIPT, OF_PYTEST))
        self._form, self._entry_point, self._first = kind, entry_point, first
        self._folder = _folder()
        self._tree = ast.parse(source)
        self._source = source
        own = {name for node in ast.walk(self._tree) for name in _bound(node)} | {*dir(builtins)}
        order = ("_", *COLLECTED) if kind == "pytest" else ("_",)
        self._program = ProgramForTests(module, self, lambda name: name in own or name.startswith(order))
        needed = {name for node in ast.walk(self._tree) for name in _imported(node)} - {module}
        needed |= {"pytest"} if kind == "pytest" else set()
        self._unloaded = ""
        """Why the program does not load."""
        self._missing = [name for name in sorted(needed) if importlib.util.find_spec(name) is None]
        sys.modules[module] = self._program
        self._started = False

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._missing:
            return {"broken": f"they import {self._missing[0]}, which is not installed beside this service"}
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True).start()
            return self._outbox.get()
        said = self.answer(question)
        assert said is not None, "it waits for ever"
        return said

    def _run(self) -> None:
        forms: dict[str, Callable[[], dict[str, Any] | None]]
        forms = {"pytest": self._pytest, "check": self._check, "asserts": self._asserts}
        try:
            said = forms[self._form]()
        except BaseException as error:  # noqa: BLE001 - tests may raise anything
            said = {"over": f"{type(error).__name__}: {error}"}
        self._outbox.put(said or {"over": ""})

    def _test(self, code: CodeType, namespace: dict[str, Any]) -> str:
        """Run code of the tests; return how it failed, and nothing where it did not."""
        try:
            exec(code, namespace)
        except BaseException as error:  # noqa: BLE001 - an assertion, or whatever the program raised
            return self._how(error)
        return ""

    def _how(self, error: BaseException) -> str:
        """Say in which line of the tests an exception came up, and of a comparison what was compared."""
        trace, frame, line = error.__traceback__, None, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == OF_CODE:
                frame, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        lines = self._source.split("\n")
        source = lines[line - 1].strip()[:LONGEST_LINE] if 0 < line <= len(lines) else ""
        told = f"line {line}: {source}" if source else ""
        found = {} if frame is None else frame.f_locals
        if isinstance(error, AssertionError) and found.get(LINE) == line and found[RIGHT] is not ...:
            return f"{told}: the sides are {_brief(found[LEFT])} and {_brief(found[RIGHT])}"
        text = "" if isinstance(error, AssertionError) and not error.args else f": {text_of(error)}"
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return f"{told}: {type(error).__name__}{text[:LONGEST_LINE]}{notes}".removeprefix(": ")

    def _namespace(self) -> dict[str, Any]:
        """Return what the program has, by its names; nothing of a program that does not load."""
        namespace: dict[str, Any] = {"__name__": OF_SCRIPT}
        failed = self._test(compile(f"from {self._program.__name__} import *", "tests", "exec"), namespace)
        self._unloaded = failed and f"the program does not load: {failed}"
        return namespace

    def _asserts(self) -> None:
        """Run statement by statement; once a preparation has failed, no test passes any more."""
        tests = _tests(self._tree.body)
        self.tell({"total": len(tests)})
        namespace, prepared = self._namespace(), True
        for place, statements in enumerate(tests):
            passed, how = prepared, "" if prepared else "what prepares the tests failed"
            for node in statements:
                if not prepared or (place < self._first and _asserts(node)):
                    continue
                module = ast.fix_missing_locations(Compared().visit(ast.Module([node], [])))
                failed = self._test(compile(module, "tests", "exec"), namespace)
                passed, how = passed and not failed, how or self._unloaded or failed
                prepared &= not failed or _asserts(node)
            if place >= self._first:
                self.tell({"passed": passed, "how": how})

    def _check(self) -> None:
        """Call `check` with the function that the row names, and nothing else of the program."""
        self.tell({"total": 1})
        namespace = {"__name__": OF_CODE}
        called = f"\nfrom {self._program.__name__} import {self._entry_point}\ncheck({self._entry_point})"
        module = ast.fix_missing_locations(Compared().visit(ast.parse(self._source + called)))
        failed = self._test(compile(module, "tests", "exec"), namespace)
        self.tell({"passed": not failed, "how": failed})

    def _pytest(self) -> dict[str, Any] | None:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        import pytest

        _write(self._folder, {f"{OF_PYTEST}.py": self._source})
        seen = Seen(self)
        options = ["-s", "--noconftest", f"--rootdir={self._folder}", f"-c{os.devnull}", "-pno:cacheprovider"]
        pytest.main([*options, f"{OF_PYTEST}.py"], plugins=[seen])
        if not seen.total and not seen.failed:
            return {"broken": "pytest finds no test in them"}
        return None


LEFT, RIGHT, LINE = "@left", "@right", "@line"
"""Names that no code can have: what an assertion compares, and in which line that is."""


class Compared(ast.NodeTransformer):
    """Keeps what an assertion compares, so that a failed one can be told; what is done, and in which order, stays."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST | list[ast.stmt]:
        test = node.test
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return node
        test.left = _kept(LEFT, test.left)
        test.comparators = [_kept(RIGHT, test.comparators[0])]
        before = [
            ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value)), node)
            for name, value in ((LINE, node.lineno), (RIGHT, ...))
        ]
        return [*before, node]  # a list takes the place of the statement


def _kept(name: str, value: ast.expr) -> ast.NamedExpr:
    return ast.NamedExpr(ast.Name(name, ast.Store()), value)


def _brief(value: Any) -> str:
    """Return a value as Python writes it; an object of the program, which would be asked how, is only named."""
    peer = Peer()
    try:
        packed = peer.pack(value)
        # A copy of plain types: no code of anybody's writes it.
        written = "an object" if _refers(packed) else repr(peer.unpack(packed))
    except (ValueError, TypeError, RecursionError):  # too deep, too long, or no key of a copy
        return "an object"
    return written if len(written) <= LONGEST_LINE else f"{written[:LONGEST_LINE]}..."


def _refers(packed: Any) -> bool:
    """Return whether there is an object in a packed value."""
    if isinstance(packed, dict):
        return not {"mine", "yours", "exception"}.isdisjoint(packed) or any(map(_refers, packed.values()))
    return isinstance(packed, list) and any(map(_refers, packed))


class Seen:
    """A plugin of pytest's that says of each test whether it passed."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._how = ""
        self.total = 0
        self.failed = False
        """A file of tests could not be loaded, or a test failed."""

    def pytest_collectreport(self, report: Any) -> None:
        self.failed |= bool(report.failed)

    def pytest_collection_finish(self, session: Any) -> None:
        self.total = len(session.items)
        if self.total and not self.failed:
            self._checks.tell({"total": self.total})

    def pytest_runtest_logstart(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test that skips itself did not run.
        if report.outcome != "passed" and not self.failed:
            self.failed = True
            crash = getattr(report.longrepr, "reprcrash", None)
            what = f"line {crash.lineno}: {crash.message}" if crash else f"it was {report.outcome}"
            self._how = f"{report.nodeid.partition('::')[2]}: {what}"[: 2 * LONGEST_LINE]

    def pytest_runtest_logfinish(self) -> None:
        self._checks.tell({"passed": not self.failed, "how": self._how if self.failed else ""})


def _tests(statements: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Return the tests of a script: each statement that asserts at the top level, with those that prepare it.

    What follows the last one belongs to it, for it may call assertions. A script without one is a single test.
    """
    ends = [place + 1 for place, node in enumerate(statements) if _asserts(node)]
    return [statements[start:end] for start, end in pairwise([0, *ends[:-1], len(statements)])]


def _asserts(node: ast.AST) -> bool:
    defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not defines and any(isinstance(one, ast.Assert) for one in ast.walk(node))


def _imported(node: ast.AST) -> list[str]:
    """Return the packages that a statement imports."""
    if isinstance(node, ast.Import):
        return [one.name.partition(".")[0] for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a piece of code gives to something of its own, or that it takes for a module, as `np`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [node.value.id] if node.value.id.islower() else []
    if isinstance(node, ast.Import):
        return [(one.asname or one.name).partition(".")[0] for one in node.names]
    if isinstance(node, ast.ImportFrom):
        return [one.asname or one.name for one in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
