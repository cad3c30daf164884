"""Files and overrides to one validated configuration.

Invariants: later files win over earlier ones, and overrides over files; every problem is reported, all at
once, each with its place; relative paths start at the current directory of the process that loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from flotilla_core.config.document import Document
from flotilla_core.config.model import ConfigModel
from flotilla_core.config.problems import explain
from flotilla_core.config.yaml_text import read_text_file
from flotilla_core.errors import InvalidConfig

Model = TypeVar("Model", bound=ConfigModel)

MOST_OVERRIDES = 1000


def load(
    model: type[Model],
    files: Iterable[Path | str],
    overrides: Sequence[str] = (),
    *,
    resolve_paths: bool = False,
) -> Model:
    """Merge `files` left to right, apply `overrides` (`key.path=value`) and validate.

    `resolve_paths` makes every path absolute, so that the result means the same to a process elsewhere.
    """
    document = Document()
    for file in files:
        document.add_text(read_text_file(Path(file)), str(file))
    return _validated(model, document, overrides, resolve_paths)


def load_text(
    model: type[Model],
    text: str,
    *,
    source: str = "text",
    overrides: Sequence[str] = (),
    resolve_paths: bool = False,
) -> Model:
    """The same for a text; `source` names it in messages."""
    document = Document()
    document.add_text(text, source)
    return _validated(model, document, overrides, resolve_paths)


def read_values(text: str, source: str) -> dict[str, Any]:
    """The plain values of a text, which need fit no model of this release."""
    document = Document()
    document.add_text(text, source)
    return document.values


def _validated(
    model: type[Model], document: Document, overrides: Sequence[str], resolve_paths: bool
) -> Model:
    if len(overrides) > MOST_OVERRIDES:
        raise InvalidConfig(
            "there are too many overrides",
            why=f"{len(overrides)} were given, and {MOST_OVERRIDES} is the limit",
        )
    for assignment in overrides:
        document.override(assignment)
    try:
        config = model.model_validate(document.values)
    except ValidationError as error:
        raise explain(error, model, document) from None
    return config.with_paths_from(Path.cwd()) if resolve_paths else config
