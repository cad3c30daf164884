"""A packed sequence gets the same numbers as alone, and models that break this are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from flotilla_trainer.rank.model_checks import packing_refusal
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel

TOLERANCE = 1e-5
CPU = torch.device("cpu")
LENGTHS = [1, 9, 9, 30, 4]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "gpt2": lambda: GPT2Config(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1
    ),
}


def policy_of(config: Any) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(Auto.from_config(config, dtype=torch.float32))


def logits(policy: PolicyModel, sequences: list[torch.Tensor], packed: bool) -> torch.Tensor:
    """Return [all tokens, vocabulary], sequence after sequence."""
    rows: list[tuple[torch.Tensor, PackedRow | None]] = [(sequence, None) for sequence in sequences]
    if packed:
        rows = [(torch.cat(sequences), PackedRow.of([len(sequence) for sequence in sequences], CPU))]
    hidden = [policy.hidden_states(tokens[None], torch.arange(len(tokens)), row) for tokens, row in rows]
    return policy.causal_lm.get_output_embeddings()(torch.cat(hidden))


@pytest.fixture(params=MODELS)
def policy(request: pytest.FixtureRequest) -> PolicyModel:
    return policy_of(MODELS[request.param]())


@pytest.fixture
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator) for length in LENGTHS]


def test_logits_of_packed_sequences_are_those_of_lone_ones(
    policy: PolicyModel, sequences: list[torch.Tensor]
) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            logits(policy, sequences, packed=True),
            logits(policy, sequences, packed=False),
            atol=TOLERANCE,
            rtol=TOLERANCE,
        )


def test_gradients_of_packed_sequences_are_those_of_lone_ones(
    policy: PolicyModel, sequences: list[torch.Tensor]
) -> None:
    gradients = []
    for packed in (True, False):
        policy.zero_grad()
        logits(policy, sequences, packed).log_softmax(-1)[:, 3].mean().backward()
        gradients.append(
            [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
        )
    assert max(float(gradient.abs().max()) for gradient in gradients[1]) > 1e-3
    for packed_gradient, lone in zip(*gradients, strict=True):
        torch.testing.assert_close(packed_gradient, lone, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sequence_never_sees_its_neighbours(policy: PolicyModel, sequences: list[torch.Tensor]) -> None:
    with torch.no_grad():
        before = logits(policy, sequences, packed=True)
        others = [96 - sequence for sequence in sequences[:-1]]
        after = logits(policy, [*others, sequences[-1]], packed=True)
    assert torch.equal(before[-LENGTHS[-1] :], after[-LENGTHS[-1] :])
    assert not torch.allclose(before[: -LENGTHS[-1]], after[: -LENGTHS[-1]])


def test_models_whose_only_memory_is_attention_may_be_packed(policy: PolicyModel) -> None:
    assert packing_refusal(policy, torch.float32, CPU) == ""


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "config",
    [
        lambda: MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
        lambda: Qwen3NextConfig(**SHAPE | HYBRID),
    ],
    ids=["mamba", "linear-attention"],
)
def test_models_with_a_state_are_refused_by_name(config: Callable[[], Any]) -> None:
    policy = policy_of(config())
    refusal = packing_refusal(policy, torch.float32, CPU)
    assert type(policy.causal_lm).__name__ in refusal
    assert "state beyond attention" in refusal


class ShortConvolution(torch.nn.Module):
    """Mixes each token with the one before it, whatever sequence that belongs to."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + 0.01 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])


def test_a_model_that_leaks_without_saying_so_is_found_by_its_numbers() -> None:
    policy = policy_of(MODELS["qwen3"]())
    layer = policy.causal_lm.base_model.layers[1]
    layer.mlp = ShortConvolution(layer.mlp)
    assert "see its neighbour" in packing_refusal(policy, torch.float32, CPU)


def test_a_model_that_keeps_the_borders_from_its_attention_is_found_by_its_numbers() -> None:
    policy = policy_of(MODELS["llama"]())
    for layer in policy.causal_lm.base_model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *inputs, packed_row=None, attend=attend, **more: attend(
            *inputs, **more
        )
    assert "see its neighbour" in packing_refusal(policy, torch.float32, CPU)


def test_rows_and_packed_rows_may_alternate(policy: PolicyModel, sequences: list[torch.Tensor]) -> None:
    with torch.no_grad():
        alone = [logits(policy, sequences, packed=False) for _ in range(2)]
        logits(policy, sequences, packed=True)
        alone.append(logits(policy, sequences, packed=False))
    assert torch.equal(alone[0], alone[2])
