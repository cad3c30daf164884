"""Find the formula of a loss or an advantage by its configured name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def formula_of(
    name: str, formulas: Mapping[str, Callable[..., T]], own: Callable[..., T]
) -> Callable[..., T]:
    """Return `own`, the function of the user's, where the name has a colon, otherwise the formula of that name."""
    if ":" in name:
        return own
    if name not in formulas:
        file = next(iter(formulas.values())).__module__.rpartition(".")[2]
        raise LookupError(
            f"exact_update has no formula of {name}: write one into exact_update/{file}.py of libs/testing, without a "
            "look at the code that it judges, and list it in FORMULAS there (docs/contributing.md has the recipe)"
        )
    return formulas[name]
