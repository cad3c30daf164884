"""The tests of a row, in the shapes in which data sets have them.

Invariants: a row whose tests cannot be run as it says has no score. What a test expects is in no field that a program
gets. A test whose verdict would be the status of a program alone is refused: every program can end with 0.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from flotilla_reward.builtin import CannotScore, Sample

COLUMNS = ("tests", "test_cases", "input_output", "test_list", "test", "verification_info")
FUNCTIONS = ("function", "fn_name", "func_name", "entry_point")
INPUTS, OUTPUTS = ("input", "stdin"), ("output", "stdout", "expected_output", "expected")


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
    """A function gets arguments, and returns a result."""

    function: str
    arguments: list[Any]
    keywords: dict[str, Any]
    result: Any


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
        tests = _tests(found, sample.info)
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
        if "inputs" in found:
            name = _first(found, FUNCTIONS, "")
            pairs = zip(found["inputs"], found["outputs"], strict=True)
            return Tests(tuple(_pair(one, output, name) for one, output in pairs))
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
        return Script("check", source, str(_first(row, FUNCTIONS)))
    if any(name.startswith(("test", "Test")) for name in defined) or _has_cases(tree):
        return Script("pytest", source)
    if not any(isinstance(one, ast.Assert) for one in ast.walk(tree)):
        raise ValueError("the code has no assertion, no function check, and no tests for pytest")
    return Script("asserts", source)


def _has_cases(tree: ast.Module) -> bool:
    kinds = [ast.unparse(base) for one in tree.body if isinstance(one, ast.ClassDef) for base in one.bases]
    return any(kind.endswith("TestCase") for kind in kinds)


def _pair(given: Any, output: Any, name: str) -> Run | Call:
    if name:
        return Call(name, list(given), {}, output)
    return Run(_text(given), _text(output), None, {})


def _case(one: dict[str, Any], row: dict[str, Any]) -> Run | Call:
    name = str(_first(one, FUNCTIONS, ""))
    if one.get("testtype") == "functional":
        metadata = _read(row.get("metadata") or {})
        name = name or str(_first(metadata, FUNCTIONS))
        lines = str(one["input"]).split("\n")
        return Call(name, [json.loads(line) for line in lines], {}, json.loads(one["output"]))
    if name:
        arguments = _first(one, ("arguments", "args", "input"), [])
        keywords = _first(one, ("keywords", "kwargs"), {})
        return Call(
            name, list(_read(arguments)), dict(keywords), _first(one, ("expected", "result", "output"))
        )
    command, files = one.get("command"), dict(one.get("files", {}))
    if command is not None and not (isinstance(command, str | list) and command):
        raise ValueError("a command is neither a text nor a list of texts")
    for path in map(PurePosixPath, files):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the file {path} of a test leads out of its folder")
    return Run(_text(_first(one, INPUTS, "")), _text(_first(one, OUTPUTS)), command, files)


def _first(row: dict[str, Any], names: tuple[str, ...], *default: Any) -> Any:
    """Return the first of several columns that a row has; without a default one of them has to be there."""
    for name in names:
        if name in row:
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
