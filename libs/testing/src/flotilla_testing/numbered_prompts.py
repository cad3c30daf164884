"""Prompts without words: who draws them is tested, not what they ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class NumberedPrompts:
    """Prompt n is the nth that was drawn, and its only token is n."""

    rest_epochs = 0
    learns_outcomes = False
    left_out = None

    def __init__(self) -> None:
        self.drawn = 0

    def next(self, step: int = 0) -> Any:
        """One prompt after the other, from wherever the cursor says."""
        self.drawn += 1
        return self.known(0, self.drawn - 1)

    def known(self, epoch: int, index: int) -> Any:
        """One that was drawn before."""
        tokens = np.array([index], dtype=np.int32)
        return SimpleNamespace(
            epoch=epoch,
            index=index,
            prompt_text="",
            token_ids=tokens,
            answer="",
            info={},
            data_set="",
            teacher="",
            chat=[],
            answer_column={},
        )

    def pass_by(self, drawn: list[tuple[int, int]]) -> None:
        """Go behind prompts that were drawn before."""
        self.drawn = max(self.drawn, *(index + 1 for _, index in drawn), 0)

    @property
    def cursor(self) -> dict[str, int]:
        """The position of the next prompt."""
        return {"position": self.drawn}

    def restore(self, cursor: dict[str, int]) -> None:
        """Go on from there."""
        self.drawn = cursor["position"]
