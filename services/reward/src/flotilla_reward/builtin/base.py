"""The base of every built-in reward.

Invariants: the fields are the reward's parameters and the docstring is what `ListRewards` shows, so neither
can drift from the code. A reward that is not `bounded` runs in a process that can be killed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from flotilla_reward.sample import CannotScore, Sample


class BuiltinReward(BaseModel):
    """A reward and its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    bounded: ClassVar[bool]
    """Time grows no faster than the text, whatever the text: such a reward runs inside the service."""

    @abstractmethod
    def score(self, sample: Sample) -> float:
        """The score of `sample`; raises `CannotScore` where there is none."""


def answer_of(sample: Sample) -> str:
    """The right answer, stripped; a sample without one cannot be compared."""
    answer = sample.answer.strip()
    if not answer:
        raise CannotScore("the sample has no answer to compare with: check data.answer_field of the run")
    return answer


def text_after(marker: str | None, response: str) -> str | None:
    """What follows the last `marker`, all of `response` without one; None where the marker is missing."""
    if marker is None:
        return response
    _, found, rest = response.rpartition(marker)
    return rest if found else None
