"""Figures of the source tree: how many modules there are, how long, how connected, and how their docstrings begin.

    .venv/bin/python scripts/tree_figures.py [TREE] [--fragments] [--commands]

A package is a library or a service; its modules are its sources without generated code and without `__init__` files.
`tests/contract/test_tree_figures.py` holds the limits. `--fragments` lists the docstrings that are no sentences, and
those of attributes that open with a fragment. `--commands` measures commands whose start everybody waits for; the
machine should have nothing else to do. Of the tree as a whole it counts:

- product: lines of what users run: all sources of `libs` and `services` but generated ones and `libs/testing`.
- tests: lines of all Python files in folders `tests`, and of `libs/testing`.
- circles: groups of modules that import each other in a circle, those of functions counted; type-checking imports too.
- local imports of the command line: import statements inside functions of `libs/cli`.
- private reads of tests: `thing._name`, where `thing` is neither `self` nor `cls`, nor of Python or torch.
- trip of a sample: files that the list `docs/trip-of-a-sample.txt` names, all of which have to be there.
"""

from __future__ import annotations

import argparse
import ast
import re
import resource
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
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
ATTRIBUTE_FRAGMENT = re.compile(
    r"[a-z]|(About|Above|According|After|Among|As|At|Before|Behind|Below|Beside|Between|Beyond|But|By|Either|Else|For|"
    r"From|How|However|If|In|Inside|Into|It|Its|Nobody|None|Of|On|Only|Or|Otherwise|Since|So|Than|That|Their|Them|Then|"
    r"There|These|They|This|Those|Through|To|Under|Unless|Until|Upon|Were|What|When|Where|Whether|Which|While|Who|"
    r"Whoever|Whose|Why|With|Within|Without)\b"
)
"""Beginnings of attribute docstrings that are neither a noun phrase nor a sentence that stands alone."""
TRIP = Path("docs/trip-of-a-sample.txt")
COMMANDS = (
    "--help",
    "run list",
    "run plan examples/arithmetic/grpo.yaml",
    "run plan examples/arithmetic/sft.yaml",
)


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
    local_imports: int
    """Import statements inside functions."""
    fragments: tuple[Fragment, ...]
    attributes: int
    """Docstrings of attributes."""
    attribute_fragments: tuple[Fragment, ...]

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
    attribute_share: float
    """Share of the docstrings of attributes that open with a fragment."""


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


def circles_of_modules(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    names = {module.name for module in modules}
    imported = {module.name: module.imports & names - {module.name} for module in modules}
    reached = {name: _reached(imported, name) for name in names}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in names}
    return sorted(sorted(circle) for circle in circles if circle)


def _reached(imported: dict[str, frozenset[str]], name: str) -> set[str]:
    """Return all modules that a module imports, itself or by others; itself only where a circle leads back."""
    found: set[str] = set()
    following = [name]
    while following:
        new = imported[following.pop()] - found
        found |= new
        following.extend(new)
    return found


def private_reads(root: Path) -> int:
    """Count the reads of private members in tests."""
    count = 0
    for path in tests_of(root):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                whose = ast.unparse(node.value).partition(".")[0]
                named_so = node.attr == "_replace" or whose in ("self", "cls", "os", "sys", "torch")
                count += isinstance(node.ctx, ast.Load) and not named_so
    return count


def tests_of(root: Path) -> list[Path]:
    """List the files of tests, without what tests share in `libs/testing`."""
    folders = [root / "tests", *root.glob("libs/*/tests"), *root.glob("services/*/tests")]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


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
        attribute_share=sum(len(module.attribute_fragments) for module in modules)
        / max(sum(module.attributes for module in modules), 1),
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
        local_imports=_local_imports(nodes),
        fragments=tuple(_fragments(path, nodes)),
        attributes=len(attributes := list(_attributes(path, nodes))),
        attribute_fragments=tuple(one for one in attributes if ATTRIBUTE_FRAGMENT.match(one.text)),
    )


def _local_imports(nodes: list[ast.AST]) -> int:
    inside = {
        id(node)
        for function in nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in _statements(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(inside)


def _attributes(path: Path, nodes: list[ast.AST]) -> Iterator[Fragment]:
    """Yield the docstrings of attributes: strings that follow an assignment."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for one, following in pairwise(body):
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
                text = following.value.value if isinstance(following.value, ast.Constant) else None
                if isinstance(text, str):
                    yield Fragment(f"{path}:{following.lineno}", text.strip().splitlines()[0])


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
    cli.add_argument("--commands", action="store_true", help="measure commands, in a tree that is installed")
    asked = cli.parse_args()
    modules = read_tree(asked.tree)
    small = small_with_one_importer(modules)
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        packages[module.package].append(module)
    packages["everything"] = modules
    print(f"{'':24}modules  median  p90  longest  small with one importer  imports  fragments  of attributes")
    for name, own in packages.items():
        if any(module.counts for module in own):
            row = figures(own, small)
            print(
                f"{name:24}{row.modules:7}{row.median_lines:8.0f}{row.p90_lines:5.0f}{row.longest:9}"
                f"{row.small_with_one_importer:25}{row.import_share:9.1%}{row.fragments:11}"
                f"{row.attribute_share:15.0%}"
            )
    print("circle of packages:", " -> ".join(circle_of_packages(modules)) or "none")
    circles = [", ".join(circle) for circle in circles_of_modules(modules)]
    print("circles of modules:", "; ".join(circles) or "none")
    for name, value in _of_the_tree(asked.tree, modules).items():
        print(f"{name}: {value:,}")
    for command in COMMANDS if asked.commands else ():
        print(f"flotilla {command}: {seconds_of(command, asked.tree.resolve()):.2f} s of processor time")
    if asked.fragments:
        for fragment in (
            one for module in modules for one in (*module.fragments, *module.attribute_fragments)
        ):
            print(f"{fragment.place}: {fragment.text}")


def seconds_of(command: str, root: Path) -> float:
    """Return the seconds of processor time of a command with its children, the median of ten times."""
    taken = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [root / ".venv/bin/flotilla", *command.split()], cwd=root, capture_output=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return statistics.median(taken)


def _of_the_tree(root: Path, modules: list[Module]) -> dict[str, int]:
    testing = sum(module.lines for module in modules if module.package == "libs/testing")
    found = {
        "product": sum(module.lines for module in modules) - testing,
        "tests": sum(len(path.read_text("utf-8").splitlines()) for path in tests_of(root)) + testing,
        "local imports of the command line": sum(
            one.local_imports for one in modules if one.package == "libs/cli"
        ),
        "private reads of tests": private_reads(root),
    }
    if (root / TRIP).is_file():
        lines = (root / TRIP).read_text("utf-8").splitlines()
        named = [line for line in lines if line and not line.startswith("#")]
        if missing := [name for name in named if not (root / name).is_file()]:
            raise SystemExit(f"{TRIP} names what is not there: {', '.join(missing)}")
        found["trip of a sample"] = len(named)
    return found


if __name__ == "__main__":
    main()
