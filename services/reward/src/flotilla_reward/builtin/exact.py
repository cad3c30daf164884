"""Comparison of texts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from flotilla_reward.builtin.base import BuiltinReward, answer_of, text_after
from flotilla_reward.sample import Sample


class Exact(BuiltinReward):
    """1 when the response is the answer, character by character; else 0. Outer white space does not count."""

    bounded: ClassVar[bool] = True

    after: str | None = Field(default=None, min_length=1)
    """Compare only what follows the last such marker; a response without it scores 0."""
    ignore_case: bool = False
    """Upper and lower case are the same."""

    def score(self, sample: Sample) -> float:
        answer = answer_of(sample)
        text = text_after(self.after, sample.response)
        if text is None:
            return 0.0
        text = text.strip()
        if self.ignore_case:
            return float(text.casefold() == answer.casefold())
        return float(text == answer)
