"""The page of troubleshooting is true: each of the 64 symptoms has an entry, and what keeps an entry true exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
LIMITS = ROOT / "docs" / "known-limits.md"
SYMPTOMS = {*(f"A{number}" for number in range(1, 40)), *(f"B{number}" for number in range(1, 26))}
LINES = ("Why", "Flotilla", "You", "Proof")

ENTRY = re.compile(r"^### (?P<title>.*) \((?P<codes>[AB\d, ]+)\)\n(?P<text>(?:(?!^#).*\n?)*)", re.MULTILINE)
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
CHECKERS = (
    "libs/cli/src/flotilla_cli/doctor.py",
    "libs/cli/src/flotilla_cli/stack_checks.py",
    "services/trainer/src/flotilla_trainer/service.py",
)


def entries() -> list[re.Match[str]]:
    return list(ENTRY.finditer(PAGE.read_text("utf-8")))


def all_tests() -> set[str]:
    files = (file for top in ("tests", "libs", "services") for file in (ROOT / top).rglob("test_*.py"))
    return {name for file in files for name in TEST.findall(file.read_text("utf-8"))}


def checks() -> set[str]:
    """Texts of the modules that check for `flotilla doctor`: the names of checks are among them."""
    trees = (ast.parse((ROOT / file).read_text("utf-8")) for file in CHECKERS)
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value
    }


@pytest.fixture(scope="module")
def evidence() -> dict[str, set[str]]:
    return {"tests": all_tests(), "checks": checks()}


def test_every_symptom_has_one_entry() -> None:
    codes = [code for entry in entries() for code in entry["codes"].split(", ")]
    assert sorted(codes) == sorted(SYMPTOMS)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry["codes"]) for entry in entries()])
def test_an_entry_is_whole_and_what_keeps_it_true_exists(
    entry: re.Match[str], evidence: dict[str, set[str]]
) -> None:
    said = dict(re.findall(r"^- (\w+): (.+)$", entry["text"], re.MULTILINE))
    assert tuple(said) == LINES
    named = re.findall(r"`([^`]+)`", said["Proof"])
    limits = re.findall(r'known limit "([^"]+)"', said["Proof"])
    assert named or limits, "nothing keeps this true"
    for name in named:
        kind, _, check = name.partition("doctor: ")
        assert check in evidence["checks"] if not kind else name in evidence["tests"], name
    missing = [limit for limit in limits if limit not in LIMITS.read_text("utf-8")]
    assert missing == []
