"""Comparison of numbers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation, localcontext
from typing import ClassVar

from pydantic import Field

from flotilla_reward.builtin.base import BuiltinReward, answer_of, text_after
from flotilla_reward.sample import CannotScore, Sample

# Each part starts with a character that the part before cannot hold: matching takes linear time.
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# Enough to tell neighbouring numbers of the tolerances below apart.
PRECISION = 50


class Numeric(BuiltinReward):
    """1 when the last number of the response is within a tolerance of the answer; else 0."""

    bounded: ClassVar[bool] = True

    after: str | None = Field(default=None, min_length=1)
    """Look only at what follows the last such marker; a response without it scores 0."""
    absolute_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Allowed difference. The larger one of both tolerances counts."""
    relative_tolerance: float = Field(default=1e-9, ge=0, allow_inf_nan=False)
    """Allowed difference as a share of the answer."""

    def score(self, sample: Sample) -> float:
        expected = _number(answer_of(sample))
        if expected is None:
            raise CannotScore(f"the answer {sample.answer!r:.200} is not a number")
        text = text_after(self.after, sample.response)
        numbers = NUMBER.findall(text) if text is not None else []
        got = _number(numbers[-1]) if numbers else None
        if got is None:
            return 0.0
        with localcontext(prec=PRECISION) as context:
            context.clear_traps()
            allowed = max(Decimal(self.absolute_tolerance), Decimal(self.relative_tolerance) * abs(expected))
            return float(abs(got - expected) <= allowed)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
