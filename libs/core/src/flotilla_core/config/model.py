"""The base of every configuration model.

Invariants: an unknown key is an error, values never change after validation, every field carries its meaning, with
units, in its description, and a value has the type of its key: a truth value is no number, a number no truth value, and
a text neither. Numbers are finite, and each key says its own bounds.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

LONGEST_TEXT = 4096
"""Characters of a name, a path or an address."""
LONGEST_FILE_NAME = 255
"""Bytes of one part of a path, the limit of file systems."""


class ConfigModel(BaseModel):
    """A section of a configuration file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        str_max_length=LONGEST_TEXT,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _has_the_type_of_its_key(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what would be read as another type: `steps: true` is no step, `whiten: 1` no truth value."""
        kinds = _kinds(cls, info.field_name)
        number = "a valid number" if float in kinds else "a valid integer"
        items = value if isinstance(value, list | tuple) else (value,)
        if isinstance(value, dict) and dict in kinds:
            items = tuple(value.values())
        for item in items:
            if isinstance(item, bool) and kinds.isdisjoint({bool, Any}) and kinds & {int, float}:
                raise ValueError(f"expected {number}, got the truth value {str(item).lower()}")
            if isinstance(item, int | float) and not isinstance(item, bool) and kinds & {bool}:
                raise ValueError(f"expected true or false, got the number {item}")
            if isinstance(item, str) and kinds & {int, float, bool} and kinds.isdisjoint({str, Any}):
                expected = "true or false" if bool in kinds else number
                raise ValueError(f"expected {expected}, got the text {item[:80]!r}")
            if isinstance(item, str | Path) and Path in kinds:
                expanded(Path(item))
        return value

    def with_paths_from(self, directory: Path) -> Self:
        """The same configuration with every relative path taken from `directory`."""
        return self.model_copy(update={name: _absolute(value, directory) for name, value in self})


def expanded(path: Path) -> Path:
    """The path with `~` resolved; a ValueError says why no file system has it."""
    if longest := max((part for part in path.parts if len(part.encode()) > LONGEST_FILE_NAME), default=""):
        raise ValueError(
            f"the path has a name of {len(longest.encode())} bytes, and {LONGEST_FILE_NAME} is the limit"
        )
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path.parts[0]} in the path has no home directory: {error}") from None


def _absolute(value: Any, directory: Path) -> Any:
    if isinstance(value, ConfigModel):
        return value.with_paths_from(directory)
    if isinstance(value, Path):
        return directory / expanded(value)
    if isinstance(value, tuple):
        return tuple(_absolute(item, directory) for item in value)
    if isinstance(value, dict):
        return {key: _absolute(item, directory) for key, item in value.items()}
    return value


@cache
def _kinds(model: type[ConfigModel], key: str | None) -> frozenset[Any]:
    """Types of plain values that a key takes, by itself or as the items of its list or mapping."""
    found: set[Any] = set()
    pending: list[Any] = [model.model_fields[key].annotation] if key else []
    while pending:
        annotation = pending.pop()
        origin = typing.get_origin(annotation)
        if origin is dict:
            found.add(dict)
            pending.append(typing.get_args(annotation)[1])
        elif origin in (typing.Union, types.UnionType, tuple, typing.Annotated):
            pending.extend(typing.get_args(annotation))
        elif origin is typing.Literal:
            found.update(map(type, typing.get_args(annotation)))
        else:
            found.add(annotation)
    return frozenset(found)
