"""Every key of the configuration does something: a key that nobody reads would be a silent lie.

A read is `<section>.<key>` where the syntax tree shows that `<section>` is that very section: by annotation, by the
sections above it, or by the attribute of another object that holds it. So `trainer.replicas` is not excused by a reader
of `generator.replicas`.
"""

from __future__ import annotations

import ast
import sys
import typing
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flotilla_core import config as config_package
from flotilla_core.config import ConfigModel, RunConfig, StackConfig
from flotilla_core.kinds import KINDS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "libs/core/src/flotilla_core/config"

Sections = frozenset[type[ConfigModel]]
NONE: Sections = frozenset()
Names = ChainMap[str, Sections]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPE = (*FUNCTION, ast.Lambda, ast.ClassDef)
LEARNED_FROM = (
    *FUNCTION,
    *(ast.arg, ast.AnnAssign, ast.Assign, ast.NamedExpr, ast.For, ast.comprehension, ast.Attribute, ast.Call),
)


def models_in(annotation: object) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def keys(model: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, type[ConfigModel], str]]:
    """Every key with its full path, and the section and field that it is."""
    for name, field in model.model_fields.items():
        yield prefix + name, model, name
        for below in models_in(field.annotation):
            yield from keys(below, f"{prefix}{name}.")


ALL_SECTIONS = {section for model in (RunConfig, StackConfig) for _, section, _ in keys(model)}
BY_NAME = {
    name: frozenset(models_in(value))
    for module in list(sys.modules.values())
    if module.__name__.startswith(config_package.__name__)
    for name, value in vars(module).items()
    if [*models_in(value)]
}
BY_KIND = {
    "section": {kind.section for kind in KINDS if kind.section},
    "node": {kind.node for kind in KINDS},
}
"""The sections that the table of service kinds names: `getattr(stack, kind.section)` reads each of them."""
OWN_FIELDS = "arguments"
"""A section's property that holds what it has beyond its base, to be handed to a function by name."""


def kinds_of(section: type[ConfigModel]) -> set[type[ConfigModel]]:
    """A section that stands for others is read as all of them."""
    return {each for each in ALL_SECTIONS if issubclass(each, section)}


def trees() -> list[ast.Module]:
    files = (file for folder in ("libs", "services") for file in (ROOT / folder).glob("*/src/**/*.py"))
    ours = (f for f in files if CONFIG not in f.parents and not f.name.endswith(("_pb2.py", "_pb2_grpc.py")))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in ours]


@cache
def named(annotation: ast.expr | None) -> Sections:
    """The sections that an annotation names."""
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    return frozenset().union(*(BY_NAME.get(word, NONE) for word in words))


def scopes_of(scope: ast.AST, around: Names) -> Iterator[tuple[list[ast.AST], Names]]:
    """What names are learned from in a module, a class or a function itself, with these; then every scope inside."""
    names = around.new_child()
    inside: list[ast.AST] = []
    nodes: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, LEARNED_FROM):
            nodes.append(node)
        if isinstance(node, SCOPE):
            inside.append(node)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    yield nodes, names
    for each in inside:
        yield from scopes_of(each, names)


class Reads:
    """What is read where it is known to be a section."""

    def __init__(self, sources: list[ast.Module]) -> None:
        self.found: set[tuple[type[ConfigModel], str]] = set()
        # Attributes of other objects that hold a section: `host.stack`, `self._config`.
        self._attributes: dict[str, Sections] = defaultdict(frozenset)
        scopes = [scope for source in sources for scope in scopes_of(source, ChainMap())]
        # What one pass learns of attributes and names, the next one uses; four are more than the longest chain.
        for _ in range(4):
            for nodes, names in scopes:
                for node in nodes:
                    self._learn(node, names)

    def _learn(self, node: ast.AST, names: Names) -> None:
        if isinstance(node, ast.arg):
            self._bind(ast.Name(node.arg), named(node.annotation), names)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, named(node.annotation), names)
            if isinstance(node.target, ast.Name):  # in the body of a class, a field of its objects
                self._attributes[node.target.id] |= named(node.annotation)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, names)
        elif isinstance(node, ast.NamedExpr):
            self._assign(node.target, node.value, names)
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind(node.target, self._of(node.iter, names), names)
        elif isinstance(node, FUNCTION):
            self._attributes[node.name] |= named(node.returns)
        elif isinstance(node, ast.Call) or (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        ):
            self._of(node, names)

    def _assign(self, target: ast.expr, value: ast.expr, names: Names) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._assign(one, other, names)
        else:
            self._bind(target, self._of(value, names), names)

    def _bind(self, target: ast.expr, sections: Sections, names: Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = names.get(target.id, NONE) | sections
        elif isinstance(target, ast.Attribute):
            self._attributes[target.attr] |= sections

    def _of(self, value: ast.AST, names: Names) -> Sections:
        """The sections that an expression may be; a read on the way is noted."""
        if isinstance(value, ast.Name):
            return names.get(value.id, NONE)
        if isinstance(value, ast.Attribute):
            return self._read(self._of(value.value, names), value.attr)
        if isinstance(value, ast.Call):
            called = value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if (
                name == "getattr"
                and isinstance(field := value.args[1], ast.Attribute)
                and field.attr in BY_KIND
            ):
                holder = self._of(value.args[0], names)
                return frozenset().union(*(self._read(holder, one) for one in BY_KIND[field.attr]))
            if name == "values" and isinstance(called, ast.Attribute):
                return self._of(called.value, names)
            # A class, a function whose annotation names one, or one that is told the class: `load(RunConfig, ...)`.
            told = (named(argument) for argument in value.args if isinstance(argument, ast.Name))
            return named(called).union(self._attributes.get(name, NONE), *told)
        if isinstance(value, ast.IfExp | ast.BoolOp | ast.Await | ast.Subscript | ast.Starred):
            below = (self._of(child, names) for child in ast.iter_child_nodes(value))
            return frozenset().union(*below)
        return NONE

    def _read_own_fields(self, sections: Sections) -> None:
        for section in (each for each in sections if hasattr(each, OWN_FIELDS)):
            *_, base = (kind for kind in section.__mro__ if OWN_FIELDS in vars(kind))
            for kind in kinds_of(section):
                self.found |= {(kind, field) for field in kind.model_fields.keys() - base.model_fields.keys()}

    def _read(self, sections: Sections, attribute: str) -> Sections:
        if attribute == OWN_FIELDS:
            self._read_own_fields(sections)
        holders = [section for section in sections if attribute in section.model_fields]
        self.found |= {(each, attribute) for section in holders for each in kinds_of(section)}
        if holders:
            annotations = (section.model_fields[attribute].annotation for section in holders)
            return frozenset(model for annotation in annotations for model in models_in(annotation))
        if not sections:
            return self._attributes[attribute]  # any other object may hold a section under this name
        return frozenset().union(*(self._read_property(section, attribute) for section in sections))

    def _read_property(self, section: type[ConfigModel], attribute: str) -> Sections:
        """A section's property reads the fields that its code names; its methods lead nowhere."""
        told = getattr(section, attribute, None)
        if not isinstance(told, property):
            return NONE
        fields = section.model_fields.keys() & set(told.fget.__code__.co_names)
        self.found |= {(each, field) for field in fields for each in kinds_of(section)}
        return named(ast.parse(told.fget.__annotations__["return"], mode="eval").body)


@pytest.fixture(scope="module")
def reads() -> set[tuple[type[ConfigModel], str]]:
    return Reads(trees()).found


@pytest.mark.parametrize("model", [RunConfig, StackConfig])
def test_every_configuration_key_is_read_by_a_service_or_library(
    model: type[ConfigModel], reads: set[tuple[type[ConfigModel], str]]
) -> None:
    unread = sorted({path for path, section, field in keys(model) if (section, field) not in reads})
    assert not unread, f"nobody reads {', '.join(unread)}"


def test_a_reader_of_the_same_name_in_another_section_is_no_excuse() -> None:
    source = """
def f(host: Host, stack: StackConfig):
    part = stack.generator
    return part.replicas, host.trainer.nproc
"""
    found = Reads([ast.parse(source)]).found
    assert {(section.__name__, field) for section, field in found} == {
        ("StackConfig", "generator"),
        ("GeneratorConfig", "replicas"),
    }
