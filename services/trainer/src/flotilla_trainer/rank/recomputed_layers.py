"""Activation checkpointing: a layer keeps its input for the backward pass and computes the rest again.

Invariant: off until a session asks for it, and without effect where there is no backward pass; numbers never change,
because nothing in a layer is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flotilla_trainer.rank.resting_inputs import RestingInputs


class RecomputedLayers:
    """Layers that can forget what they computed."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.on = False
        self.inputs_rest_on_host = False
        self._inputs = RestingInputs()
        for layer in layers:
            # Inside the hooks that gather a layer's shards, so that its weights are whole when it computes again.
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not (self.on and torch.is_grad_enabled()):
            return forward(*inputs, **options)
        with self._inputs.keeping() if self.inputs_rest_on_host else nullcontext():
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
