"""The reference pages say what the code is: committed pages are fresh, and metrics are those that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flotilla_core.roles import CRITIC, REFERENCE, TEACHER
from flotilla_core.telemetry.metrics import METRICS
from flotilla_testing.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
WRITERS = (
    "services/coordinator/src/**/*.py",
    "services/trainer/src/**/*.py",
    "libs/core/src/flotilla_core/evaluations.py",
)
NAME = re.compile(r"[a-z_]+(/[a-z0-9_@:<>]+)+")
NO_METRICS = {"examples/arithmetic", "evaluation/<><>"}
COMPUTED = {
    "time/<>_s": {f"time/{role}_s" for role in (CRITIC, REFERENCE, TEACHER)},
    "eval/<>": {"eval/step"},
}
"""Names that the code puts together, and what comes of them beyond phases and names that it spells elsewhere."""
PLAIN = {name for name, *_ in METRICS if "/" not in name}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return loaded(ROOT / "scripts" / "generate_reference.py")


def test_what_is_generated_is_what_the_script_writes_now(reference: ModuleType) -> None:
    written: dict[Path, str] = reference.files()
    stale = [
        path.name for path, text in written.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    assert not stale, "run .venv/bin/python scripts/generate_reference.py"


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts of the code; a part that it computes is `<>`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.JoinedStr):
            pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Call):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="phase" | "exclusive"), args=[ast.Constant(value=str(phase))]
                ):
                    yield f"time/{phase.replace(' ', '_')}_s"


def written() -> set[str]:
    """The metrics that coordinator and trainer spell."""
    files = (file for pattern in WRITERS for file in ROOT.glob(pattern))
    found = {text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8")))}
    names = {text for text in found if NAME.fullmatch(text)} - NO_METRICS
    for pattern, made in COMPUTED.items():
        assert pattern in names, f"{pattern} is not put together any more"
        names = names - {pattern} | made
    # The critic's own metrics come under its name.
    names |= {f"critic/{text}" for text in found if f"critic/{text}" in {metric.name for metric in METRICS}}
    return names | (found & PLAIN)


def test_every_metric_that_the_code_spells_is_in_the_table_and_no_other() -> None:
    named = {re.sub(r"<.*?>", "<>", metric.name) for metric in METRICS}
    spelt = written()
    assert spelt - named == set(), "add it to flotilla_core/telemetry/metrics.py"
    assert named - spelt == set(), "no code writes it: take it out of flotilla_core/telemetry/metrics.py"


def test_each_metric_is_named_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
