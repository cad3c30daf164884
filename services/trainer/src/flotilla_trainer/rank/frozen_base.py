"""Which weights lie under adapters: told apart by all of their bytes.

Invariant: two bases of one model get the same number only where all of their parameters are equal, on any device and
any number of ranks.
"""

from __future__ import annotations

import torch

from flotilla_weights.digest import pending_digest, tensor_digest


class BaseDigest:
    """The number of a base, from its parameters as they pass by one after the other, where they are."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, whole: torch.Tensor) -> None:
        """The next parameter, in full; on a GPU the work is only queued."""
        self._parts.append(pending_digest(whole))

    @property
    def number(self) -> int:
        """For all parameters so far; 0 for none."""
        # One bit less than the digest has: it travels as a signed number.
        return tensor_digest(torch.stack(self._parts)) >> 1 if self._parts else 0
