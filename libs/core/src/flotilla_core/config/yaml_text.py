"""YAML text to nodes and plain values, within limits.

Invariants: a text costs bounded time and memory, whatever it says: its size, its nesting, its values with every alias
written out and the length of a number are limited, and each refusal names the line and the limit; no text holds NUL or
half of a surrogate pair; 1e-6 is a number; dates stay text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.errors import InvalidConfig

MOST_BYTES = 256 * 1024
"""Of one file, one text or one override."""
MOST_VALUES = 20_000
"""Keys, items and values of one text, each alias counted as what it stands for."""
DEEPEST = 20
"""Levels of mappings and lists inside each other; the wire carries parameters of little more."""
LONGEST_NUMBER = 400
"""Characters; the largest float written out has 309."""
_SHOWN = 80


class YamlText(yaml.SafeLoader):
    """Safe YAML 1.1 without its surprises for numbers, dates and words, which refuses what would grow without bound."""

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
        """The node of the whole text; None where it says nothing."""
        try:
            return self.get_single_node()
        except yaml.YAMLError as error:
            raise _not_yaml(error, self.source) from None
        finally:
            self.dispose()

    def scalar(self, node: yaml.ScalarNode, name: str) -> Any:
        """The plain value of a node; `name` says in messages which one it is."""
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
        """Where a node stands."""
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
        """Values and levels of a node, with every alias written out."""
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
    """The text of a configuration file; one that is too large is not read to its end."""
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
    """The refusal of a text that is not read at all."""
    return InvalidConfig(
        "the configuration is too large",
        where=shortened(source),
        why=f"it is longer than {MOST_BYTES} bytes, the limit of one file or override",
        next_step="Keep data in files of its own, and name them.",
    )


def shortened(text: str, limit: int = _SHOWN * 2) -> str:
    """A text for a message, which a whole file would fill otherwise."""
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
