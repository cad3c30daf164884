"""The tests of a row, in the shapes in which data sets have them.

Invariants: a row whose tests cannot be run as it says has no score. What a test expects is in no field that a program
gets. A test whose verdict would be the status of a program alone is refused: every program can end with 0.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from flotilla_reward.builtin import CannotScore, Sample

COLUMNS = ("tests", "test_cases", "input_output", "test_list", "test", "verification_info")
FUNCTIONS = ("function", "fn_name", "func_name", "entry_point")
INPUTS, OUTPUTS = ("input", "stdin"), ("output", "stdout", "expected_output", "expected")
RESULTS = ("expected", "result", "output")


@dataclass(frozen=True)
class Run:
    """A program gets a text, and prints another one."""

    text: str
    output: str
    command: str | list[str] | None
    """The command that runs it, where the row names one."""
    files: dict[str, str]


@dataclass(frozen=True)
class Call:
    """A function gets arguments, and returns one of some results."""

    function: str
    arguments: list[Any]
    keywords: dict[str, Any]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Script:
    """Tests that are code: for pytest, a function `check`, or assertions."""

    kind: Literal["pytest", "check", "asserts"]
    source: str
    entry_point: str = ""


@dataclass(frozen=True)
class Tests:
    """All tests of a row."""

    cases: tuple[Run | Call, ...] = ()
    script: Script | None = None

    @property
    def least(self) -> int:
        """The number of tests; what a script has beyond its first one is known when it runs."""
        return len(self.cases) + (self.script is not None)


def tests_of(sample: Sample) -> Tests:
    """Return the tests of the row; `CannotScore` where there are none that can be run."""
    name = next((name for name in COLUMNS if sample.info.get(name)), "")
    found = _read(sample.info[name] if name else sample.answer)
    try:
        tests = _tests(found, {"prompt": sample.prompt} | sample.info)
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError) as error:
        raise CannotScore(f"the tests of the row cannot be read: {error!r:.300}") from error
    if not tests.least:
        raise CannotScore(f"the row has no tests: neither in {', '.join(COLUMNS)}, nor as the answer")
    return tests


def _read(value: Any) -> Any:
    """Return what a text is in JSON; any other text is code."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return value


def _tests(found: Any, row: dict[str, Any]) -> Tests:
    if isinstance(found, str):
        return Tests(script=_script(found, row)) if found.strip() else Tests()
    if isinstance(found, dict):
        row = row | found
        if found.get("inputs") is not None:
            return Tests(_pairs(found["inputs"], found["outputs"], _first(found, FUNCTIONS, "")))
        inner = next((found[name] for name in ("cases", *COLUMNS) if found.get(name)), None)
        if inner is None:
            return _tests([found], row)
        return _tests(_read(inner), row)
    if found and all(isinstance(one, str) for one in found):
        setup = [
            str(row[name]) for name in ("test_setup_code", "test_imports") if isinstance(row.get(name), str)
        ]
        imports = row.get("test_imports")
        setup += [str(one) for one in imports] if isinstance(imports, list) else []
        return Tests(script=_script("\n".join([*setup, *found]), row))
    return Tests(tuple(_case(one, row) for one in found))


def _script(source: str, row: dict[str, Any]) -> Script:
    tree = ast.parse(source)
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    if "check" in defined:
        entry_point = str(_first(row, FUNCTIONS))
        return Script("check", _with_prompt(source, row["prompt"], entry_point), entry_point)
    if any(name.startswith(("test", "Test")) for name in defined) or _has_cases(tree):
        return Script("pytest", source)
    if not any(isinstance(one, ast.Assert) for one in ast.walk(tree)):
        raise ValueError("the code has no assertion, no function check, and no tests for pytest")
    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    done = [part for one in tree.body if not isinstance(one, defines) for part in ast.walk(one)]
    if not any(isinstance(part, ast.Assert | ast.Call) for part in done):
        raise ValueError("nothing calls the assertions of the code")
    return Script("asserts", source)


def _with_prompt(source: str, prompt: Any, entry_point: str) -> str:
    """Return a function `check` with the code of the prompt before it, where it uses what only that defines."""
    missing = _undefined(source) - {entry_point}
    if not missing:
        return source
    whole = f"{prompt}\n{source}"
    with suppress(SyntaxError):  # The prompt may be prose, or in a chat.
        missing = _undefined(whole) - {entry_point}
    if missing:
        raise ValueError(f"{min(missing)} is defined neither beside check nor in the prompt")
    return whole


def _undefined(source: str) -> set[str]:
    """Return the names that a module uses and nothing in it defines; none where it imports all of another one."""
    if any(isinstance(one, ast.alias) and one.name == "*" for one in ast.walk(ast.parse(source))):
        return set()
    module = symtable.symtable(source, "tests", "exec")
    used, defined, scopes = set[str](), {*dir(builtins), "__file__"}, [module]
    for scope in scopes:
        scopes += scope.get_children()
        for name in scope.get_symbols():
            if name.is_global() or scope is module:
                (defined if name.is_assigned() else used).add(name.get_name())
    return used - defined


def _has_cases(tree: ast.Module) -> bool:
    kinds = [ast.unparse(base) for one in tree.body if isinstance(one, ast.ClassDef) for base in one.bases]
    return any(kind.endswith("TestCase") for kind in kinds)


def _pairs(inputs: list[Any], outputs: list[Any], name: str) -> tuple[Run | Call, ...]:
    """Return the tests of APPS; where each result is a list of one, that may be the data set's own wrapping."""
    pairs = list(zip(inputs, outputs, strict=True))
    if not name:
        return tuple(Run(_text(given), _text(output), None, {}) for given, output in pairs)
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return tuple(
        Call(name, list(given), {}, (output, *(output if wrapped else ()))) for given, output in pairs
    )


def _case(one: dict[str, Any], row: dict[str, Any]) -> Run | Call:
    name = str(_first(one, FUNCTIONS, ""))
    if one.get("testtype") == "functional":
        metadata = _read(row.get("metadata") or {})
        name = name or str(_first(metadata, FUNCTIONS))
        lines = str(one["input"]).split("\n")
        return Call(name, [json.loads(line) for line in lines], {}, (json.loads(one["output"]),))
    if name:
        arguments = _first(one, ("arguments", "args", "input"), [])
        keywords = _first(one, ("keywords", "kwargs"), {})
        if not any(name in one for name in RESULTS):
            raise ValueError(f"there is no {' or '.join(RESULTS)}")
        return Call(name, list(_read(arguments)), dict(keywords), (_first(one, RESULTS, None),))
    command, files = one.get("command"), dict(one.get("files") or {})
    if command is not None and not (isinstance(command, str | list) and command):
        raise ValueError("a command is neither a text nor a list of texts")
    for path in map(PurePosixPath, files):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the file {path} of a test leads out of its folder")
    return Run(_text(_first(one, INPUTS, "")), _text(_first(one, OUTPUTS)), command, files)


def _first(row: dict[str, Any], names: tuple[str, ...], *default: Any) -> Any:
    """Return the first of several columns that a row has; without a default one of them has to be there.

    A null is not there: tables have one where a row lacks a column of other rows.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    if not default:
        raise ValueError(f"there is no {' or '.join(names)}")
    return default[0]


def _text(value: Any) -> str:
    """Return the text of an input or output, which some rows have as a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value
