"""Selective recomputation: a layer keeps what is dear to compute and small, and computes the rest again.

Invariants: it is off until a session asks for it, and has no effect without a backward pass; numbers never change,
because nothing in a layer is random. A layer keeps its input, the outputs of attention, and products of matrices that
are at most twice as wide as what they multiply: queries, keys, values, and what attention and the feed-forward part
give back. The wide products of the feed-forward part, norms and activation functions are computed again. The rule is
part of a compiled layer's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDENING = 2
"""A product of matrices that is wider than its input by more than this factor is computed again."""
ATTENTION = ("attention", "_varlen_attn", "variable_length")
"""Parts of the names of operations that compute attention."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class SelectiveLayers:
    """Layers that can drop all but a few activations and compute them again."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.on = False
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not (self.on and torch.is_grad_enabled()):
            return forward(*inputs, **options)
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_contexts,
            **options,
        )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(keeps)


def keeps(context: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    """Return whether the output of an operation stays until the backward pass."""
    if operation in PRODUCTS:
        wide, narrow = inputs[-1].shape[1], inputs[-1].shape[0]
        kept = wide <= WIDENING * narrow
    else:
        kept = any(part in str(operation) for part in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
