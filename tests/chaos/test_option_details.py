"""Every detail of an option beside every other option, by the rules of the contract tests of option pairs."""

from __future__ import annotations

import pytest
import torch
from option_pairs.axes import CHOICES, cannot_stand_together, refines
from option_pairs.pairs import Tried


@pytest.fixture(scope="module")
def tried() -> Tried:
    torch.set_num_threads(1)
    return Tried()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", range(len(CHOICES)), ids=lambda place: str(CHOICES[place]))
def test_every_pair_with_a_detail_is_what_both_say_or_is_refused_by_both_names(
    place: int, tried: Tried
) -> None:
    one = CHOICES[place]
    others = [
        other
        for other in CHOICES[place + 1 :]
        if (refines(one) or refines(other)) and not cannot_stand_together(one, other)
    ]
    assert [problem for other in others if (problem := tried.problem(one, other))] == []
