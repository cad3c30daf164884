"""The text itself: patterns, length and repetition.

Invariant: a pattern runs in a process that can be killed, and all else takes linear time.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from flotilla_reward.builtin import BuiltinReward, CannotScore, Sample, answer_of
from flotilla_reward.verifiers.reading import visible, words_of

PATTERN_COLUMN = "pattern"


class Regex(BuiltinReward):
    """Matching by a pattern of the user's.

    1 when the response matches a Python regular expression (and a group of it is the answer); else 0, also for a
    response that keeps the pattern busy until the limit.
    """

    # A pattern may backtrack for longer than the universe is old.
    bounded: ClassVar[bool] = False
    blames_response: ClassVar[bool] = True

    pattern: str | None = Field(
        default=None,
        min_length=1,
        description="Syntax of Python's `re`; by default the column `pattern` of the row, else its answer.",
    )
    match: Literal["search", "whole"] = Field(
        default="search",
        description="`search` finds the pattern anywhere, `whole` wants it to cover the response.",
    )
    ignore_case: bool = Field(default=False, description="Upper and lower case are the same.")
    multi_line: bool = Field(default=False, description="`^` and `$` also match at line ends.")
    dot_matches_newline: bool = Field(default=False, description="`.` also matches the end of a line.")
    group: int | str | None = Field(
        default=None,
        description="Number or name of a group that must be the answer, outer white space aside.",
    )

    @model_validator(mode="after")
    def _compiles(self) -> Regex:
        if self.pattern is not None:
            self._compiled(self.pattern)
        return self

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        flags = re.NOFLAG
        flags |= re.IGNORECASE if self.ignore_case else re.NOFLAG
        flags |= re.MULTILINE if self.multi_line else re.NOFLAG
        flags |= re.DOTALL if self.dot_matches_newline else re.NOFLAG
        compiled = _compile(pattern, flags)
        known = set(range(compiled.groups + 1)) | set(compiled.groupindex)
        if self.group is not None and self.group not in known:
            raise ValueError(f"pattern {pattern!r:.200} has no group {self.group!r}")
        return compiled

    def _pattern(self, sample: Sample) -> re.Pattern[str]:
        pattern = self.pattern or sample.info.get(PATTERN_COLUMN)
        if not pattern and self.group is None:
            pattern = sample.answer
        if not isinstance(pattern, str) or not pattern:
            raise CannotScore(
                f"there is no pattern: neither as a parameter nor in the column {PATTERN_COLUMN}"
                + (" nor as the answer" if self.group is None else "")
            )
        try:
            return self._compiled(pattern)
        except ValueError as error:
            raise CannotScore(str(error)) from error

    def score(self, sample: Sample) -> float:
        pattern = self._pattern(sample)
        answer = answer_of(sample) if self.group is not None else ""
        found = (pattern.search if self.match == "search" else pattern.fullmatch)(sample.response)
        if found is None:
            return 0.0
        if self.group is None:
            return 1.0
        captured: str | None = found.group(self.group)
        return float(captured is not None and captured.strip() == answer)


@lru_cache(maxsize=256)
def _compile(pattern: str, flags: re.RegexFlag) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern {pattern!r:.200} is not a regular expression: {error}") from error


class Length(BuiltinReward):
    """Length of the response.

    1 within the bounds; outside of them less by the distance, 0 from `margin` on.
    """

    bounded: ClassVar[bool] = True

    unit: Literal["words", "characters"] = Field(
        default="words",
        description="What is counted. Tokens are not: this service does not have the policy's tokenizer.",
    )
    at_least: int = Field(default=0, ge=0, description="Shortest length that is worth 1.")
    at_most: int | None = Field(default=None, ge=0, description="Longest length that is worth 1.")
    margin: int = Field(
        default=0,
        ge=0,
        description="Distance from the bounds at which nothing is left; 0 makes the bounds hard.",
    )

    @field_validator("unit", mode="before")
    @classmethod
    def _no_tokens(cls, unit: object) -> object:
        if unit == "tokens":
            raise ValueError("tokens are not counted, for rewards see text; rollout.sampling bounds them")
        return unit

    @model_validator(mode="after")
    def _some_length(self) -> Length:
        if self.at_most is None and not self.at_least:
            raise ValueError("at_least or at_most is needed")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError("at_most is below at_least")
        return self

    def score(self, sample: Sample) -> float:
        text = visible(sample.response)
        length = len(text) if self.unit == "characters" else len(words_of(text))
        outside = max(self.at_least - length, 0 if self.at_most is None else length - self.at_most, 0)
        return max(0.0, 1.0 - outside / self.margin) if self.margin else float(not outside)


class Repetition(BuiltinReward):
    """Absence of repetition.

    The share of n-grams that are no repetition of an earlier one: 1 when nothing is said twice, also for a text that
    is shorter than an n-gram.
    """

    bounded: ClassVar[bool] = True

    n: int = Field(default=3, ge=1, le=20, description="Units in an n-gram.")
    unit: Literal["words", "characters"] = Field(
        default="words", description="What n-grams are made of; case does not count."
    )

    def score(self, sample: Sample) -> float:
        text = visible(sample.response).casefold()
        units = words_of(text) if self.unit == "words" else list(text)
        count = len(units) - self.n + 1
        if count < 2:
            return 1.0
        return len(set(zip(*(islice(units, first, None) for first in range(self.n)), strict=False))) / count
