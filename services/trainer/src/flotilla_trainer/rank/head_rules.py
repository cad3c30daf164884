"""Turn raw numbers of a head into logits, and name the scores of targets; plain operations and kernels share both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class HeadRules:
    """The scale, cap and temperature between the raw output of a head and the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def logits(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32."""
        logits = raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature


class TargetScores(NamedTuple):
    """The scores of targets, in float32, one number for each."""

    logprobs: torch.Tensor
    normalizers: torch.Tensor
    """The log of the sum of all exponentials of the logits."""
    entropies: torch.Tensor
