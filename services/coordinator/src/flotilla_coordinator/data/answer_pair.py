"""Two answers to one prompt, of which one is preferred."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Answer:
    """A given answer, with the token that ends it."""

    text: str
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class AnswerPair:
    """What a run learns from that is told which answer is better."""

    chosen: Answer
    rejected: Answer
