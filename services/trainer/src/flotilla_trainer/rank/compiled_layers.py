"""Compile the repeated layers of the model: one graph serves all layers of a kind, whatever the shape of a row.

Invariants: results are those of the plain layers up to rounding; rows and their lengths are dynamic, so that no new
length is compiled again; a layer that was compiled for `RECOMPILE_LIMIT` cases (with and without gradient, one row or
several) runs uncompiled in any other case. Only code inside the hooks that gather a layer's shards is compiled.
Attention over packed rows is one operation of the graph on GPUs, and otherwise a call of its own between two graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from flotilla_trainer.rank.packed_rows import PackedRow

RECOMPILE_LIMIT = 16
OFF_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
BACKEND: str | Callable[..., Any] = "inductor"


class CompiledLayers:
    """Layers that run compiled once `on` is set."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.on = False
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        # With True, code compiled earlier would ignore hooks that are added to a layer later, as adapters do.
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        for layer in layers:
            # Made by its first use: the first one imports the compiler, for seconds.
            compiled = cache(partial(torch.compile, layer.forward, backend=BACKEND))
            layer.forward = partial(self._forward, layer.forward, compiled)

    def _forward(
        self,
        plain: Callable[..., Any],
        compiled: Callable[[], Callable[..., Any]],
        *inputs: Any,
        **options: Any,
    ) -> Any:
        if not self.on:
            return plain(*inputs, **options)
        for tensor in _tensors((inputs, options)):
            _mark_row(tensor)
        return compiled()(*inputs, **options)


def compiler_refusal(device: torch.device) -> str:
    """Return why nothing can be compiled here; empty where it can.

    It compiles a small sum, because compilers fail in many ways.
    """
    if switched_off := [name for name in OFF_SWITCHES if os.environ.get(name) == "1"]:
        return f"{switched_off[0]} is set in the environment of this rank"
    numbers = torch.ones(64, device=device, requires_grad=True)
    try:
        torch.compile(_sum_of_exponentials)(numbers).backward()
    except (RuntimeError, OSError, ImportError) as error:
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """Describe a compiler's error in one line; the rest of it only helps the compiler's developers."""
    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    first_line, *_ = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {first_line}"


def _sum_of_exponentials(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.exp().sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, PackedRow):
        yield from (value.layout.borders, value.layout.ways)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _mark_row(tensor: torch.Tensor) -> None:
    """Mark the sizes that vary: rows and tokens.

    Hidden states, positions and their embeddings are [rows, tokens, ...]; masks are [rows, 1, tokens, tokens]; the
    borders of a packed row are [sequences + 1].
    """
    places = (2, 3) if tensor.ndim == 4 else (1,)
    for place in (0, *places):
        # Compilers always treat the length 1 as a special case.
        if place < tensor.ndim and tensor.shape[place] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, place)
