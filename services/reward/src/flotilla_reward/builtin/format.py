"""The shape of a response, whatever it says."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field, field_validator

from flotilla_reward.builtin.base import BuiltinReward
from flotilla_reward.sample import Sample

TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class Format(BuiltinReward):
    """1 when the response is tagged sections, each once, in order, with nothing around them; else 0."""

    bounded: ClassVar[bool] = True

    sections: tuple[str, ...] = Field(default=("think", "answer"), min_length=1)
    """Tag names: `think` stands for `<think>...</think>`."""
    allow_empty: bool = False
    """A section may hold nothing but white space."""

    @field_validator("sections")
    @classmethod
    def _tags(cls, sections: tuple[str, ...]) -> tuple[str, ...]:
        for name in sections:
            if not TAG_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a tag name: letters, digits, _ and -, without brackets")
        if len(set(sections)) != len(sections):
            raise ValueError("a section is named twice")
        return sections

    def score(self, sample: Sample) -> float:
        rest = sample.response
        for name in self.sections:
            opening, closing = f"<{name}>", f"</{name}>"
            if sample.response.count(opening) != 1 or sample.response.count(closing) != 1:
                return 0.0
            before, opened, rest = rest.partition(opening)
            content, closed, rest = rest.partition(closing)
            if not opened or not closed or before.strip():
                return 0.0
            if not content.strip() and not self.allow_empty:
                return 0.0
        return float(not rest.strip())
