"""Which weights lie under adapters: told apart without reading all of them.

Invariant: two bases of one model get the same number only where all of their tensors begin alike, and training moves
every tensor.
"""

from __future__ import annotations

import torch

from flotilla_weights.digest import tensor_digest

BEGINNING = 4096


def fingerprint(tensors: dict[str, torch.Tensor]) -> int:
    """A number for these weights, from the first elements of each."""
    beginnings = [tensors[name].reshape(-1)[:BEGINNING].float() for name in sorted(tensors)]
    # One bit less than the digest has: it travels as a signed number.
    return tensor_digest(torch.cat(beginnings)) >> 1
