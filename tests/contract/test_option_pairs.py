"""Every option of an update alone, and beside every other: what is accepted computes what it says, and all of it acts.

A pair is either refused, with both keys in the message, or the update that the trainer makes of it equals an
independent one in float64, values and gradients, and resetting either key changes that update. The options come from
the models of the configuration: a new one fails here until it has a formula and values. The details of an option are
tried beside all others by the chaos tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from option_pairs.axes import CHOICES, A, L, cannot_stand_together, refines, without
from option_pairs.pairs import TOLERANCE, Tried, refusal

from flotilla_testing.exact_update import advantages, losses
from flotilla_testing.exact_update.lookup import formula_of
from flotilla_testing.option_axes import Choice

OPTIONS = [choice for choice in CHOICES if not refines(choice)]


@pytest.fixture(scope="module")
def tried() -> Tried:
    torch.set_num_threads(1)
    return Tried()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_option_alone_is_what_its_formula_says(choice: Choice, tried: Tried) -> None:
    assert tried.config(choice.settings) is not None, refusal(choice.settings)
    # Both updates of the scene: what the first leaves to the second is compared as well.
    assert tried.distance(choice.settings, 0, 2) <= TOLERANCE
    assert tried.acts(choice.key, choice.settings)


def needed_of(choice: Choice) -> list[str]:
    """The keys that it means nothing without, beside the section that it stands in."""
    own = (f"{A}.type", f"{L}.type", f"{A}.overlong", f"{A}.overlong.buffer_tokens")
    # Each key of this section means something by itself; the others only make its effect visible.
    own += (f"{A}.reward_normalization.mean", f"{A}.reward_normalization.clip")
    return [key for key in choice.needs[0] if key not in own and not choice.key.startswith(f"{key}.")]


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if needed_of(choice)], ids=str)
def test_an_option_without_what_it_needs_is_refused_by_both_names(choice: Choice) -> None:
    for key in needed_of(choice):
        said = refusal(without(key, choice.settings))
        others = [choice.key, *(other for other in choice.needs[0] if other != key)]
        assert key.removeprefix("algorithm.") in said
        assert any(other.removeprefix("algorithm.") in said for other in others)


@pytest.mark.parametrize("place", range(len(OPTIONS)), ids=lambda place: str(OPTIONS[place]))
def test_every_pair_of_options_is_what_both_say_or_is_refused_by_both_names(place: int, tried: Tried) -> None:
    one = OPTIONS[place]
    others = [other for other in OPTIONS[place + 1 :] if not cannot_stand_together(one, other)]
    assert [problem for other in others if (problem := tried.problem(one, other))] == []


@pytest.mark.parametrize(
    ("file", "formulas"), [("losses", losses.FORMULAS), ("advantages", advantages.FORMULAS)]
)
def test_a_name_without_a_formula_is_told_with_the_file_that_lacks_it(
    file: str, formulas: dict[str, Any]
) -> None:
    with pytest.raises(LookupError, match=rf"no formula of spo: .* exact_update/{file}\.py .* FORMULAS"):
        formula_of("spo", formulas, own=lambda: None)
