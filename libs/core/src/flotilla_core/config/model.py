"""The base of every configuration model.

Invariants: an unknown key is an error, values never change after validation, and every field carries
its meaning, with units, in its description.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A section of a configuration file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    def with_paths_from(self, directory: Path) -> Self:
        """The same configuration with every relative path taken from `directory`."""
        return self.model_copy(update={name: _absolute(value, directory) for name, value in self})


def _absolute(value: Any, directory: Path) -> Any:
    if isinstance(value, ConfigModel):
        return value.with_paths_from(directory)
    if isinstance(value, Path):
        return directory / value.expanduser()
    if isinstance(value, tuple):
        return tuple(_absolute(item, directory) for item in value)
    return value
