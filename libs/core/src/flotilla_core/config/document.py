"""YAML with memory: plain values, and where each key was written.

Invariants: the origin of a key path is the last file or override that set it; the same key twice in one
mapping is an error; 1e-6 is a number; dates stay text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from flotilla_core.errors import InvalidConfig

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.1 without its surprises for numbers, dates and words."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


# YAML 1.1 reads on, off, yes and no as truth values, where some keys take `on` and `off` beside `auto`.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
# YAML 1.1 wants a dot in a float and reads 1e-6 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass
class Document:
    """A mapping under construction from files and overrides, left to right."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def add_text(self, text: str, source: str) -> None:
        """Merge a YAML text; mappings merge key by key, everything else replaces."""
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        except yaml.YAMLError as error:
            raise _not_yaml(error, source) from None
        finally:
            loader.dispose()
        if node is None:
            raise InvalidConfig("the configuration is empty", where=source)
        value = _Reader(loader, source, self.origins).read(node, ())
        if not isinstance(value, dict):
            raise InvalidConfig(
                "a configuration is a mapping of keys to values",
                where=source,
                why=f"this is {describe(value)}",
            )
        _merge(self.values, value)

    def override(self, assignment: str) -> None:
        """Apply `key.path=value`; the value is YAML, a number in the path is the index of a list."""
        path_text, equals, value_text = assignment.partition("=")
        parts = path_text.strip().split(".")
        if not equals or not all(parts):
            raise InvalidConfig(
                f"cannot read the override {assignment!r}",
                next_step="Write key.path=value, for example steps=20.",
            )
        source = f"override {assignment}"
        try:
            value = yaml.load(value_text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise _not_yaml(error, source) from None
        self._set([*parts], value, source)

    def origin(self, path: KeyPath) -> str:
        """Where `path`, or the nearest key around it, was set."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return ""

    def _set(self, parts: list[str], value: Any, source: str) -> None:
        container: Any = self.values
        path: KeyPath = ()
        for position, part in enumerate(parts):
            key: Any = part
            if isinstance(container, list):
                if not part.isdigit() or int(part) >= len(container):
                    raise InvalidConfig(
                        f"{join(path)} has no item {part}", where=source, why=f"it has {len(container)} items"
                    )
                key = int(part)
            path = (*path, key)
            if position == len(parts) - 1:
                container[key] = value
                self.origins[path] = source
            else:
                below = container[key] if isinstance(container, list) else container.get(key)
                if not isinstance(below, dict | list):
                    below = container[key] = {}
                    self.origins[path] = source
                container = below


class _Reader:
    """Builds plain values from YAML nodes and notes the line of every key."""

    def __init__(self, loader: yaml.SafeLoader, source: str, origins: dict[KeyPath, str]) -> None:
        self._loader = loader
        self._source = source
        self._origins = origins
        self._open: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            try:
                return self._loader.construct_object(node)
            except (yaml.YAMLError, ValueError) as error:
                raise InvalidConfig(
                    f"cannot read {join(path)}", where=self._line(node), why=str(error)
                ) from None
        if id(node) in self._open:
            raise InvalidConfig("an alias refers to itself", where=self._line(node))
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, path)
            return [self._read_item(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        written = [
            key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"
        ]
        values: dict[str, Any] = {}
        self._loader.flatten_mapping(node)
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidConfig("a key must be plain text", where=self._line(key_node))
            key = key_node.value
            if written.count(key) > 1:
                raise InvalidConfig(f"{join((*path, key))} is set twice", where=self._line(key_node))
            self._origins[(*path, key)] = self._line(key_node)
            values[key] = self.read(value_node, (*path, key))
        return values

    def _read_item(self, node: yaml.Node, path: KeyPath) -> Any:
        self._origins[path] = self._line(node)
        return self.read(node, path)

    def _line(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"


def join(path: KeyPath) -> str:
    """A key path as people write it: rewards[0].weight."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def describe(value: Any) -> str:
    """A value for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return f"the text {str(value)!r}"


def _merge(base: dict[str, Any], top: dict[str, Any]) -> None:
    for key, value in top.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(below, value)
        else:
            base[key] = value


def _not_yaml(error: yaml.YAMLError, source: str) -> InvalidConfig:
    mark = getattr(error, "problem_mark", None)
    where = source if mark is None else f"{source}:{mark.line + 1}"
    problem = getattr(error, "problem", None) or str(error)
    return InvalidConfig("this is not valid YAML", where=where, why=problem)
