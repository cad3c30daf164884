"""What is kept of the reference to say how likely it finds every token of the vocabulary.

Invariant: hidden states for the scored tokens and one head, so that whoever compares makes logits for as many tokens at
a time as it can hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ReferenceStates(NamedTuple):
    """The reference on one micro-batch; nothing of it carries a gradient."""

    hidden: torch.Tensor
    """[scored tokens, hidden size], in their order."""
    weight: torch.Tensor
    """The head, whole."""
    bias: torch.Tensor | None

    def split(self, tokens: int) -> list[ReferenceStates]:
        """So many tokens at a time."""
        return [self._replace(hidden=hidden) for hidden in self.hidden.split(tokens)]
