"""Figures of the source tree: how many modules there are, how long, how connected, and how their docstrings begin.

    .venv/bin/python scripts/tree_figures.py [TREE] [--fragments]

Counts what users run: the sources of `libs` and `services`, without generated code and without `__init__` files.
`tests/contract/test_tree_figures.py` holds the limits. `--fragments` lists the docstrings that are no sentences.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

SOURCES = ("libs/*/src", "services/*/src")
GENERATED = (
    "libs/proto/",
    "libs/client/src/flotilla_client/synchronous.py",
    "libs/client/src/flotilla_client/synchronous_loop.py",
)
SMALL_LINES = 60

FRAGMENT = re.compile(
    r"(As|By|From|How|It|Its|Nobody|Of|That|Their|They|Those|To|Until|What|Where|Which|Who|Whoever|Why|With)\b"
)
"""First words of docstrings that cannot be read without the source."""


class Fragment(NamedTuple):
    """A docstring that is no sentence."""

    place: str
    text: str


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    """From the root of the tree."""
    lines: int
    import_lines: int
    imports: frozenset[str]
    """Dotted names, of modules and of what is imported from them."""
    fragments: tuple[Fragment, ...]

    @property
    def package(self) -> str:
        """The library or service that it belongs to, for example services/trainer."""
        return "/".join(self.path.parts[:2])

    @property
    def name(self) -> str:
        """Its dotted name."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[parts.index("src") + 1 :])

    @property
    def counts(self) -> bool:
        """Return whether it is more than the front page of a package."""
        return self.path.name != "__init__.py"


@dataclass(frozen=True)
class Figures:
    """What the modules of a package have in common."""

    modules: int
    median_lines: float
    p90_lines: float
    longest: int
    small_with_one_importer: int
    import_share: float
    fragments: int


def read_tree(root: Path) -> list[Module]:
    """Read every source file below `root`."""
    paths = [path for pattern in SOURCES for folder in root.glob(pattern) for path in folder.rglob("*.py")]
    relative = sorted(path.relative_to(root) for path in paths)
    return [_read(root, path) for path in relative if not path.as_posix().startswith(GENERATED)]


def small_with_one_importer(modules: list[Module]) -> list[Module]:
    """List the modules that are a paragraph of the one module that imports them."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.imports:
            importers[name].add(module.name)
    return [
        module
        for module in modules
        if module.counts and module.lines < SMALL_LINES and len(importers[module.name] - {module.name}) == 1
    ]


def circle_of_packages(modules: list[Module]) -> list[str]:
    """Return packages that import each other in a circle, the first again at the end; empty where there is none.

    A module in the root of a library or service counts as a package of its own.
    """
    packages = {_package(module.name) for module in modules if "." in module.name}
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        own = _package(module.name)
        if own in packages:
            graph[own] |= {_package(name) for name in module.imports} & packages - {own}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _package(name: str) -> str:
    """Return the library or service of a dotted name, with the package inside it."""
    return ".".join(name.split(".")[:2])


def figures(modules: list[Module], small: list[Module]) -> Figures:
    """Work out the figures of some modules; `small` are those of the whole tree."""
    counted = [module for module in modules if module.counts]
    lines = sorted(module.lines for module in counted)
    own = set(counted)
    return Figures(
        modules=len(counted),
        median_lines=statistics.median(lines),
        p90_lines=lines[int(0.9 * (len(lines) - 1))],
        longest=lines[-1],
        small_with_one_importer=sum(module in own for module in small),
        import_share=sum(module.import_lines for module in counted) / sum(lines),
        fragments=sum(len(module.fragments) for module in modules),
    )


def _read(root: Path, path: Path) -> Module:
    text = (root / path).read_text()
    nodes = list(_statements(ast.parse(text)))
    statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return Module(
        path=path,
        lines=len(text.splitlines()),
        import_lines=sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in statements),
        imports=frozenset(name for node in statements for name in _imported(node)),
        fragments=tuple(_fragments(path, nodes)),
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all its statements; what they compute is not looked at, which is most of a tree."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, name, ())
        for statement in below if isinstance(below, list) else ():
            yield from _statements(statement)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _fragments(path: Path, nodes: list[ast.AST]) -> Iterator[Fragment]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield Fragment(f"{path}:{getattr(node, 'lineno', 1)}", text.splitlines()[0])


def main() -> None:
    """Print the figures of every library and service."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("tree", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    cli.add_argument("--fragments", action="store_true", help="list the docstrings that are no sentences")
    asked = cli.parse_args()
    modules = read_tree(asked.tree)
    small = small_with_one_importer(modules)
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        packages[module.package].append(module)
    packages["everything"] = modules
    print(f"{'':24}modules  median  p90  longest  small with one importer  imports  fragments")
    for name, own in packages.items():
        if any(module.counts for module in own):
            row = figures(own, small)
            print(
                f"{name:24}{row.modules:7}{row.median_lines:8.0f}{row.p90_lines:5.0f}{row.longest:9}"
                f"{row.small_with_one_importer:25}{row.import_share:9.1%}{row.fragments:11}"
            )
    print("circle of packages:", " -> ".join(circle_of_packages(modules)) or "none")
    if asked.fragments:
        for fragment in (fragment for module in modules for fragment in module.fragments):
            print(f"{fragment.place}: {fragment.text}")


if __name__ == "__main__":
    main()
