"""A name in a configuration that may stand for a function of ours or for one in a file of the user's.

Invariant: ours are plain names, the user's are written path.py:function and never look like ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from flotilla_core.config.model import ConfigModel, expanded
from flotilla_core.structs import unfit

PATTERN = r"^.+\.py:[A-Za-z_]\w*$"


def _fit_the_wire(parameters: dict[str, Any]) -> dict[str, Any]:
    for name, value in parameters.items():
        if problem := unfit(value, name):
            raise ValueError(problem)
    return parameters


def possible_function(name: str) -> str:
    """The name, where a file system may have the file in it."""
    file, colon, _ = name.rpartition(":")
    if colon and file.endswith(".py"):
        expanded(Path(file))
    return name


Parameters = Annotated[dict[str, Any], AfterValidator(_fit_the_wire)]
"""What a function of the user's, or a reward, is called with beside its samples."""


class UserFunction(ConfigModel):
    """A function in a file of the user's."""

    type: Annotated[str, AfterValidator(possible_function)] = Field(pattern=PATTERN)
    """path.py:function."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the function by keyword."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the function is called with."""
        return self.parameters

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"type": function_path(self.type, directory)})


def function_path(name: str, directory: Path) -> str:
    """`name` with its file taken from `directory`; names of ours stay as they are."""
    file, colon, function = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        return name
    return f"{directory / expanded(Path(file))}:{function}"


def kind_of(section: Any) -> Any:
    """Which member of a union a section is: `user` for a function of the user's, else its type."""
    kind = section.get("type") if isinstance(section, dict) else getattr(section, "type", None)
    return "user" if isinstance(kind, str) and ":" in kind else kind
