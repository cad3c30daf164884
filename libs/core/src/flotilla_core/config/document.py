"""The values of a configuration as YAML files and overrides give them, and the place where each was written.

Invariants: a text costs bounded time and memory, whatever it contains: its size, its nesting, its values with every
alias expanded and the length of a number are limited, and each refusal names the line and the limit; no text holds
NUL or half of a surrogate pair; 1e-6 is a number; dates stay text. The origin of a key path is the last file or
override that
set it; the same key twice in one mapping is an error.

PyYAML stays the parser. With ruamel.yaml 0.19 loading alone took 1.7 times as long as our whole read of a file of 3000
items (0.72 s against 0.44 s of CPU), and its YAML 1.2 reads other values: `012` as 12, dates as dates.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.errors import InvalidConfig

KeyPath = tuple[str | int, ...]

MOST_BYTES = 256 * 1024
"""Limit for one file, one text or one override."""
MOST_VALUES = 20_000
"""Limit on keys, items and values of one text; each alias counts as the values that it expands to."""
DEEPEST = 20
"""Limit on nested mappings and lists; the wire carries parameters that are hardly deeper."""
LONGEST_NUMBER = 400
"""Limit in characters; the largest float written out has 309."""
_SHOWN = 80


class YamlText(yaml.SafeLoader):
    """Safe YAML 1.1 without its surprises for numbers, dates and words; refuses texts that grow without bound."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        size = len(text) if len(text) > MOST_BYTES else len(text.encode(errors="replace"))
        if size > MOST_BYTES:
            raise too_large(source)
        before, nul, _ = text.partition("\0")
        if nul:
            line = before.count("\n") + 1
            raise _holds_nul(f"{source}:{line}")
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        try:
            super().__init__(text)
        except yaml.YAMLError as error:
            raise _not_yaml(error, source) from None

    def root(self) -> yaml.Node | None:
        """Return the node of the whole text; None for an empty text."""
        try:
            return self.get_single_node()
        except yaml.YAMLError as error:
            raise _not_yaml(error, self.source) from None
        finally:
            self.dispose()

    def scalar(self, node: yaml.ScalarNode, name: str) -> Any:
        """Return the plain value of a node; `name` names it in messages."""
        if not node.tag.endswith(":str") and len(node.value) > LONGEST_NUMBER:
            raise InvalidConfig(
                f"cannot read {name}",
                where=self.place_of(node),
                why=f"it is a number of {len(node.value)} characters, and {LONGEST_NUMBER} is the limit",
                next_step="Write text in quotes.",
            )
        try:
            value = self.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            why = shortened(getattr(error, "problem", None) or str(error))
            raise InvalidConfig(f"cannot read {name}", where=self.place_of(node), why=why) from None
        if isinstance(value, str):
            self._refuse_what_no_text_is(value, self.place_of(node))
        return value

    def place_of(self, node: yaml.Node) -> str:
        """Return the position of a node in its text, for messages."""
        return f"{self.source}:{node.start_mark.line + 1}"

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node while all of it stays within the limits."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = f"{self.source}:{event.start_mark.line + 1}"
        self._values += 1
        if self._values > MOST_VALUES:
            raise _too_many(place)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _too_deep(place)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = self._size(node, place)
        return node

    def _size(self, node: yaml.Node, place: str) -> tuple[int, int]:
        """Count the values and levels of a node, with every alias expanded."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        sizes = [self._sizes.get(id(child)) for child in children]
        values, levels = 1, 1
        for size in sizes:
            if size is None:
                raise InvalidConfig("an alias refers to itself", where=place)
            values, levels = values + size[0], max(levels, 1 + size[1])
        if values > MOST_VALUES:
            raise _too_many(place)
        if levels > DEEPEST:
            raise _too_deep(place)
        return values, levels

    @staticmethod
    def _refuse_what_no_text_is(value: str, place: str) -> None:
        if "\0" in value:
            raise _holds_nul(place)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidConfig(
                "the text is not Unicode", where=place, why="it holds half of a surrogate pair"
            ) from None


# YAML 1.1 reads on, off, yes and no as truth values, where some keys take `on` and `off` beside `auto`.
YamlText.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


# YAML 1.1 wants a dot in a float and reads 1e-6 as text.
YamlText.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text_file(path: Path) -> str:
    """Return the text of a configuration file; stop reading one that is too large."""
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig("cannot read the configuration file", where=str(path), why=why) from None
    if len(content) > MOST_BYTES:
        raise too_large(str(path))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidConfig("the configuration file is not UTF-8 text", where=str(path)) from None


def too_large(source: str) -> InvalidConfig:
    """Return the error for a text that is too large to be read."""
    return InvalidConfig(
        "the configuration is too large",
        where=shortened(source),
        why=f"it is longer than {MOST_BYTES} bytes, the limit of one file or override",
        next_step="Keep data in files of its own, and name them.",
    )


def shortened(text: str, limit: int = _SHOWN * 2) -> str:
    """Shorten a text for a message, which a whole file would fill otherwise."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _too_many(place: str) -> InvalidConfig:
    return InvalidConfig(
        "the configuration has too many values",
        where=place,
        why=f"here they are more than {MOST_VALUES}, the limit with every alias written out",
    )


def _too_deep(place: str) -> InvalidConfig:
    return InvalidConfig(
        "the configuration is nested too deeply",
        where=place,
        why=f"here are more than {DEEPEST} levels of mappings and lists, the limit with every alias written out",
    )


def _holds_nul(place: str) -> InvalidConfig:
    return InvalidConfig("the text holds NUL", where=place, why="no name and no path can hold that character")


def _not_yaml(error: yaml.YAMLError, source: str) -> InvalidConfig:
    mark = getattr(error, "problem_mark", None)
    where = source if mark is None else f"{source}:{mark.line + 1}"
    problem = getattr(error, "problem", None) or str(error)
    return InvalidConfig("this is not valid YAML", where=where, why=shortened(problem))


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
        # The line numbers of an override are useless: the message quotes its text.
        value = None if node is None else _Reader(loader, {}).read(node, (*parts,))
        self._set([*parts], value, source)

    def origin(self, path: KeyPath) -> str:
        """Return the place where `path`, or the nearest key around it, was set."""
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
    """Return a key path in its usual spelling: rewards[0].weight."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def describe(value: Any) -> str:
    """Describe a value for a message."""
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
