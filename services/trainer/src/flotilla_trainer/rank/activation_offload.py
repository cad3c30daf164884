"""Activation checkpointing: a layer keeps some activations, on the device or on the host, and computes the rest again.

Invariants: it is off until a session asks for it, and has no effect without a backward pass; numbers never change,
because nothing in a layer is random, and an input comes back from the host bit for bit. A layer keeps its input alone,
or with it the outputs of attention, and products of matrices that are at most twice as wide as what they multiply:
queries, keys, values, and what attention and the feed-forward part give back. That choice is part of a compiled layer's
graph. A copy to the host runs while further layers compute, and is done before its copy back begins. Tensors that are
already in host memory, as all are without an accelerator, stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDENING = 2
"""A product of matrices that is wider than its input by more than this factor is computed again."""
ATTENTION = "attention"
"""Part of the names of operations that compute attention."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class RecomputedLayers:
    """Layers that can drop their activations and compute them again."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.on = False
        self.inputs_rest_on_host = False
        self._inputs = ActivationOffload()
        for layer in layers:
            # Inside the hooks that gather a layer's shards, so that its weights are whole when it computes again.
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not (self.on and torch.is_grad_enabled()):
            return forward(*inputs, **options)
        with self._inputs.keeping() if self.inputs_rest_on_host else nullcontext():
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


class SelectiveLayers:
    """Layers that can drop all but a few activations and compute them again."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.on = False
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        # In this order a compiled layer's graph without gradient does not depend on the switch, and is kept.
        if not (torch.is_grad_enabled() and self.on):
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
        kept = ATTENTION in str(operation)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class ActivationOffload:
    """Keeps the inputs of recomputed layers in host memory until the backward pass asks for them."""

    def __init__(self) -> None:
        self._outward: torch.cuda.Stream | None = None

    def keeping(self) -> AbstractContextManager[object]:
        """Keep tensors that autograd saves inside the block on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._put_away, self._fetch)

    def _put_away(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if not tensor.is_cuda:
            return tensor.device, tensor
        if self._outward is None:
            self._outward = torch.cuda.Stream(tensor.device)
        resting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            resting.copy_(tensor, non_blocking=True)
        # The allocator must not reuse this memory before the copy is made.
        tensor.record_stream(self._outward)
        return tensor.device, resting

    def _fetch(self, kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, resting = kept
        if self._outward is not None and device.type == "cuda":
            torch.cuda.current_stream().wait_stream(self._outward)
        return resting.to(device, non_blocking=True)
