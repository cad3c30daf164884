"""Notebooks of the examples: cells without outputs that use what the client offers. `make test-docs` runs them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flotilla_client
from flotilla_client import SyncClient, SyncLoop

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "custom_loop" / "grpo.py"
NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))
OBJECTS = {"fleet": SyncClient, "loop": SyncLoop}


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def code_of(notebook: Path) -> Iterator[ast.Module]:
    for cell in cells(notebook, "code"):
        yield ast.parse("".join(cell["source"]), filename=f"{notebook.name} {cell['id']}")


def methods(tree: ast.AST, name: str) -> set[str]:
    """Return the attributes of the variable `name` that the code uses."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_cells_of_format_4_that_compile_and_no_outputs(notebook: Path) -> None:
    written = json.loads(notebook.read_text("utf-8"))
    assert (written["nbformat"], {cell["cell_type"] for cell in written["cells"]}) == (
        4,
        {"code", "markdown"},
    )
    for cell in cells(notebook, "code"):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_uses_what_the_client_exports(notebook: Path) -> None:
    for tree in code_of(notebook):
        imported = {
            (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flotilla")
            for alias in node.names
        }
        assert imported <= {("flotilla_client", name) for name in flotilla_client.__all__}
        for name, kind in OBJECTS.items():
            assert {one for one in methods(tree, name) if not hasattr(kind, one)} == set()


def test_the_notebook_of_the_custom_loop_has_every_primitive_of_the_script() -> None:
    used = {name for tree in code_of(SCRIPT.with_suffix(".ipynb")) for name in methods(tree, "loop")}
    assert used > methods(ast.parse(SCRIPT.read_text("utf-8")), "loop") > {"sample", "score", "optim_step"}
