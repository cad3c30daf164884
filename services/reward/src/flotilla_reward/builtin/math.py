"""Mathematical equality, by math-verify.

Its own time limits use SIGALRM, so they are off: the worker process that this runs in is killed instead.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from pydantic import Field

from flotilla_reward.builtin.base import BuiltinReward, answer_of
from flotilla_reward.sample import CannotScore, Sample

# Without one of these math-verify takes an answer for prose and may pick a part of it.
MATH_MARKS = ("$", r"\boxed", r"\(", r"\[", r"\begin{")

# It warns about its missing time limit at every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class Math(BuiltinReward):
    r"""1 when the final expression of the response (best in `\boxed{}`) equals the answer; else 0."""

    # Simplification may never end.
    bounded: ClassVar[bool] = False

    significant_digits: int = Field(default=15, ge=1, le=50)
    """Precision of comparisons that have to be done numerically."""
    decimals: int = Field(default=6, ge=0, le=50)
    """Decimal numbers are rounded to so many places before they are compared."""

    def score(self, sample: Sample) -> float:
        from math_verify import parse, verify  # type: ignore[import-untyped]

        answer = answer_of(sample)
        marked = answer if any(mark in answer for mark in MATH_MARKS) else rf"\boxed{{{answer}}}"
        expected = parse(marked, parsing_timeout=None, raise_on_error=True)
        if not expected:
            raise CannotScore(f"the answer {sample.answer!r:.200} is not an expression that can be read")
        got = parse(sample.response, parsing_timeout=None, raise_on_error=True)
        equal = verify(
            expected,
            got,
            float_rounding=self.decimals,
            numeric_precision=self.significant_digits,
            timeout_seconds=None,
            raise_on_error=True,
        )
        return float(equal)
