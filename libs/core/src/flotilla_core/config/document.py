"""YAML with memory: plain values, and where each key was written.

Invariants: the origin of a key path is the last file or override that set it; the same key twice in one
mapping is an error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import yaml

from flotilla_core.config.yaml_text import DEEPEST, YamlText, shortened
from flotilla_core.errors import InvalidConfig

KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    """A mapping under construction from files and overrides, left to right."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def add_text(self, text: str, source: str) -> None:
        """Merge a YAML text; mappings merge key by key, everything else replaces."""
        loader = YamlText(text, source)
        node = loader.root()
        if node is None:
            raise InvalidConfig("the configuration is empty", where=source)
        value = _Reader(loader, self.origins).read(node, ())
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
                f"cannot read the override {shortened(assignment)!r}",
                next_step="Write key.path=value, for example steps=20.",
            )
        source = f"override {shortened(assignment)}"
        if len(parts) > DEEPEST:
            raise InvalidConfig(
                "the key path is too long",
                where=source,
                why=f"it has {len(parts)} parts, and {DEEPEST} is the limit",
            )
        loader = YamlText(value_text, source)
        node = loader.root()
        # Lines of an override are of no use: its text stands in the message.
        value = None if node is None else _Reader(loader, {}).read(node, (*parts,))
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
                if not part.isdecimal() or len(part) > 9 or int(part) >= len(container):
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

    def __init__(self, loader: YamlText, origins: dict[KeyPath, str]) -> None:
        self._loader = loader
        self._origins = origins
        self._flat: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._loader.scalar(node, join(path))
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        return [self._read_item(item, (*path, index)) for index, item in enumerate(node.value)]

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._flatten(node, path)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self._origins[(*path, key)] = self._loader.place_of(key_node)
            values[key] = self.read(value_node, (*path, key))
        return values

    def _flatten(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Put what `<<` names before the keys of the mapping, once: an alias leads to the same node again."""
        if id(node) in self._flat:
            return
        self._flat.add(id(node))
        written = Counter(self._key(key) for key, _ in node.value if key.value != "<<")
        for key, _ in node.value:
            if written[key.value] > 1:
                raise InvalidConfig(
                    f"{join((*path, key.value))} is set twice", where=self._loader.place_of(key)
                )
        self._loader.flatten_mapping(node)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidConfig("a key must be plain text", where=self._loader.place_of(node))
        return str(node.value)

    def _read_item(self, node: yaml.Node, path: KeyPath) -> Any:
        self._origins[path] = self._loader.place_of(node)
        return self.read(node, path)


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
    return f"the text {shortened(str(value))!r}"


def _merge(base: dict[str, Any], top: dict[str, Any]) -> None:
    for key, value in top.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(below, value)
        else:
            base[key] = value
