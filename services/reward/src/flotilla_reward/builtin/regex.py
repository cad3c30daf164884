"""Matching by a pattern of the user's."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from flotilla_reward.builtin.base import BuiltinReward, answer_of
from flotilla_reward.sample import Sample


class Regex(BuiltinReward):
    """1 when the response matches a Python regular expression (and a group of it is the answer); else 0."""

    # A pattern may backtrack for longer than the universe is old.
    bounded: ClassVar[bool] = False

    pattern: Annotated[str, Field(min_length=1)]
    """Syntax of Python's `re`."""
    match: Literal["search", "whole"] = "search"
    """`search` finds the pattern anywhere, `whole` wants it to cover the response."""
    ignore_case: bool = False
    """Upper and lower case are the same."""
    multi_line: bool = False
    """`^` and `$` also match at line ends."""
    dot_matches_newline: bool = False
    """`.` also matches the end of a line."""
    group: int | str | None = None
    """Number or name of a group that must be the answer, outer white space aside."""

    _compiled: re.Pattern[str] = PrivateAttr()

    @model_validator(mode="after")
    def _compile(self) -> Regex:
        flags = re.NOFLAG
        flags |= re.IGNORECASE if self.ignore_case else re.NOFLAG
        flags |= re.MULTILINE if self.multi_line else re.NOFLAG
        flags |= re.DOTALL if self.dot_matches_newline else re.NOFLAG
        try:
            self._compiled = re.compile(self.pattern, flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {self.pattern!r:.200} is not a regular expression: {error}") from error
        known = set(range(self._compiled.groups + 1)) | set(self._compiled.groupindex)
        if self.group is not None and self.group not in known:
            raise ValueError(f"pattern {self.pattern!r:.200} has no group {self.group!r}")
        return self

    def score(self, sample: Sample) -> float:
        answer = answer_of(sample) if self.group is not None else ""
        find = self._compiled.search if self.match == "search" else self._compiled.fullmatch
        found = find(sample.response)
        if found is None:
            return 0.0
        if self.group is None:
            return 1.0
        captured: str | None = found.group(self.group)
        return float(captured is not None and captured.strip() == answer)
