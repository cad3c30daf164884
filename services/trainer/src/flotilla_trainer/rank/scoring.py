"""Score given tokens without a gradient: log-probabilities under a policy, or values by a critic.

A policy scores as it computes, or in float32 by the rounded weights that it computes with: what its own rounding is
measured by.

Invariants: the first rank of each group that shares rows answers with the tokens of that group in the order of its
micro-batches; the front puts them back in place. `Float32Policy` holds no weights of its own. Those of one layer, and
those outside of all layers, are gathered, rounded to the type of the model and widened for as long as a pass needs
them. Every rank gathers the same weights in the same order, because each one passes as many micro-batches through the
same layers. Adapters are merged into the weights, as generators merge them. It never learns, and runs none of what the
model was compiled to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel, TokenScores
from flotilla_trainer.rank.sharded_model import ShardedModel, repeated_layers
from flotilla_trainer.rank.update import micro_batches
from flotilla_trainer.wire.frames import Array, Frame


class Float32Policy:
    """Scores like the policy of `model`, whose weights it borrows; `moved` is called after every part of a pass."""

    def __init__(self, model: ShardedModel, moved: Callable[[], None]) -> None:
        policy = model.policy
        assert isinstance(policy, PolicyModel), "the front asks policies alone"
        self._model = model
        config = copy.deepcopy(policy.causal_lm.config)
        with torch.device("meta"):
            causal_lm = PolicyModel.skeleton(config, torch.float32)
        for name, buffer in policy.causal_lm.named_buffers():
            owner, leaf = _owner(causal_lm, name)
            owner._buffers[leaf] = buffer
        self._policy = PolicyModel(causal_lm, model.lane)
        self._empty = dict(causal_lm.named_parameters())
        self._places = _places(causal_lm)
        layers = repeated_layers(causal_lm)
        self._policy.report_progress(layers, moved)
        self._outside = list(self._empty)
        for layer in layers:
            own = {id(parameter) for parameter in layer.parameters()}
            names = [name for name, parameter in self._empty.items() if id(parameter) in own]
            self._outside = [name for name in self._outside if name not in names]
            layer.register_forward_pre_hook(partial(self._before, names))
            layer.register_forward_hook(partial(self._after, names))

    def __call__(self, *given: Any, **options: Any) -> TokenScores:
        """Score as the policy does; a collective."""
        with torch.no_grad(), self._filled(self._outside):
            scores: TokenScores = self._policy(*given, **options)
            return scores

    def _before(self, names: list[str], layer: nn.Module, inputs: Any) -> None:
        self._fill(names)

    def _after(self, names: list[str], layer: nn.Module, inputs: Any, output: Any) -> None:
        self._clear(names)

    @contextmanager
    def _filled(self, names: list[str]) -> Iterator[None]:
        self._fill(names)
        try:
            yield
        finally:
            self._clear(names)

    def _fill(self, names: list[str]) -> None:
        tensors = self._model.whole_tensors(names, self._model.dtype)
        if self._model.adapters is not None:
            tensors = self._model.adapters.merged_into(tensors)
        for name, whole in tensors:
            self._set(name, nn.Parameter(whole.float(), requires_grad=False))

    def _clear(self, names: list[str]) -> None:
        for name in names:
            self._set(name, self._empty[name])

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for owner, leaf in self._places[name]:
            owner._parameters[leaf] = parameter


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where each parameter is held, by its first name: tied ones are held in several places."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, leaf))
    return places


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def score(command: Frame, model: ShardedModel, link: FrontLink) -> dict[str, Array]:
    """Return scores of this lane's tokens: logprobs and, where asked for, the likeliest tokens and sums of squares."""
    parts: list[tuple[torch.Tensor, ...]] = []
    total = len(command.fields["idle"])
    policy = Float32Policy(model, link.moved) if command.fields["in_float32"] else model.policy
    with torch.no_grad():
        for index, (columns, idle) in enumerate(micro_batches(command, model.device)):
            link.progress(f"scoring micro-batch {index + 1} of {total}")
            scores = policy(
                columns["tokens"],
                columns["positions"],
                columns["targets"].long(),
                temperature=command.fields["temperature"],
                chunk_tokens=command.fields["chunk_tokens"],
                top_k=command.fields["top_k"],
                packed_row=PackedRow.among(columns),
                squares=command.fields["squares"],
            )
            if not idle and model.mesh.counts_tokens:
                parts.append((scores.logprobs, scores.top_ids.int(), scores.top_logprobs, scores.squares))
    if not parts:
        return {}
    joined = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return dict(zip(("logprobs", "top_ids", "top_logprobs", "squares"), joined, strict=True))


def values_of(command: Frame, model: ShardedModel, link: FrontLink) -> dict[str, Array]:
    """Return the values of this lane's tokens."""
    parts: list[torch.Tensor] = []
    total = len(command.fields["idle"])
    with torch.no_grad():
        for index, (columns, idle) in enumerate(micro_batches(command, model.device)):
            link.progress(f"values of micro-batch {index + 1} of {total}")
            values = model.policy(
                columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns)
            )
            if not idle and model.mesh.counts_tokens:
                parts.append(values)
    return {"values": torch.cat(parts).cpu().numpy()} if parts else {}
