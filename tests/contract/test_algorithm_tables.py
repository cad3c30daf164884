"""Names and parameters of advantages and losses are the same where they are configured and where they are computed."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_algorithms import ADVANTAGES
from flotilla_core.config.advantages import AdvantageSection
from flotilla_core.config.losses import LossSection
from flotilla_core.config.presets import PRESETS
from flotilla_trainer.losses.table import LOSSES

DOCUMENT = Path(__file__).parents[2] / "docs/algorithms.md"
CHOSEN_BY_THE_FRONT = {"share", "covariance_low", "covariance_high"}


def sections(union: Any) -> dict[str, Any]:
    """The members of a union that name functions of ours, by type."""
    members = [typing.get_args(member)[0] for member in typing.get_args(typing.get_args(union)[0])]
    ours = [member() for member in members if not member.model_fields["type"].is_required()]
    return {section.type: section for section in ours}


def parameters(function: Callable[..., Any]) -> set[str]:
    kinds = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("union", "table"), [(AdvantageSection, ADVANTAGES), (LossSection, LOSSES)])
def test_every_function_is_configured_by_its_own_parameters(
    union: Any, table: dict[str, Callable[..., Any]]
) -> None:
    configured = sections(union)
    assert configured.keys() == table.keys()
    for name, section in configured.items():
        assert section.arguments.keys() - CHOSEN_BY_THE_FRONT == parameters(table[name]), name


@pytest.mark.parametrize("name", sorted({*ADVANTAGES, *LOSSES, *PRESETS}))
def test_every_name_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCUMENT.read_text("utf-8")
