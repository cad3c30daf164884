"""Layers that compute wide parts again keep less, and give the numbers of those that keep all."""

from __future__ import annotations

import torch

from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank.activation_offload import SelectiveLayers
from flotilla_trainer.rank.policy_model import PolicyModel

LENGTH = 24


def policy() -> PolicyModel:
    return PolicyModel(tiny_qwen3(intermediate_size=128))


def test_wide_parts_are_computed_again_and_attention_is_not() -> None:
    model = policy()
    selective = SelectiveLayers(model.causal_lm.model.layers)
    tokens = torch.randint(31, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH - 1)
    gradients, forward, backward = [], [], []
    for on in (False, True):
        selective.on = on
        with Counted() as counted:
            scores = model(tokens, positions, tokens[0, 1:], temperature=1.0, chunk_tokens=8)
        forward.append(counted.calls)
        with Counted() as counted:
            found = torch.autograd.grad(scores.logprobs.sum(), list(model.parameters()))
        gradients.append(found)
        backward.append(counted.calls)
    for mine, right in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    assert forward[0]["aten.mm"] == forward[1]["aten.mm"]
    again = {name: backward[1].get(name, 0) - backward[0].get(name, 0) for name in backward[1]}
    # Gate and up of two layers; neither another product nor attention.
    assert again["aten.mm"] == 4
    assert not [name for name, count in again.items() if "attention" in name and count]


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):  # type: ignore[no-untyped-def]
        name = str(operation).rpartition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return operation(*inputs, **(options or {}))
