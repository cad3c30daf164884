"""A model with the fused head learns the weights that it learns with plain operations of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flotilla_core.config import LoraConfig
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank import fused_head
from flotilla_trainer.rank.fused_head import PLAIN
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.policy_model import PolicyModel

VOCABULARY = 131
CPU = torch.device("cpu")


def trained(logprobs_of: Callable[[PolicyModel, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights after ten updates of a model with tied embeddings, and the last gradients."""
    policy = PolicyModel(tiny_qwen3(vocab_size=VOCABULARY, tie_word_embeddings=True))
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-3)
    random = torch.Generator().manual_seed(2)
    for _ in range(10):
        adamw.zero_grad()
        tokens = torch.randint(VOCABULARY, (2, 24), generator=random)
        advantages = torch.randn(46, generator=random)
        (-(advantages * logprobs_of(policy, tokens)).mean()).backward()
        adamw.step()
    named = dict(policy.named_parameters())
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in named.items()}
    return {name: tensor.detach() for name, tensor in (named | gradients).items() if tensor is not None}


POSITIONS = torch.cat([torch.arange(23), torch.arange(24, 47)])


def fused_logprobs(policy: PolicyModel, tokens: torch.Tensor) -> torch.Tensor:
    scored = tokens[:, 1:].flatten()
    return policy(tokens, POSITIONS, scored, temperature=0.9, chunk_tokens=5).logprobs


def plain_logprobs(policy: PolicyModel, tokens: torch.Tensor) -> torch.Tensor:
    logits = policy.causal_lm(input_ids=tokens, use_cache=False).logits.flatten(0, 1)[POSITIONS] / 0.9
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:].reshape(-1, 1)).squeeze(-1)


def test_weights_after_ten_updates_are_those_of_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "operations_on", lambda device: PLAIN)
    found, right = trained(fused_logprobs), trained(plain_logprobs)
    for name, value in right.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 1e-4, name


def test_a_head_with_adapters_still_learns_through_them() -> None:
    policy = PolicyModel(tiny_qwen3(vocab_size=VOCABULARY))
    policy.requires_grad_(False)
    adapters = Adapters(policy.causal_lm, LoraConfig(rank=2, alpha=4.0, targets=("lm_head",)), 0, CPU)
    tokens = torch.arange(48).reshape(2, 24)
    policy(
        tokens, POSITIONS, tokens[:, 1:].flatten(), temperature=1.0, chunk_tokens=5
    ).logprobs.sum().backward()
    assert any(bool(p.grad.any()) for p in adapters.named_parameters().values() if p.grad is not None)


def test_scores_are_the_same_with_and_without_likeliest_tokens() -> None:
    policy = PolicyModel(tiny_qwen3(vocab_size=VOCABULARY, tie_word_embeddings=True))
    tokens = torch.arange(48).reshape(2, 24)
    asked = tokens, POSITIONS, tokens[:, 1:].flatten()
    with torch.no_grad():
        alone = policy(*asked, temperature=0.7, chunk_tokens=46)
        with_top = policy(*asked, temperature=0.7, chunk_tokens=46, top_k=3)
    assert torch.equal(alone.logprobs, with_top.logprobs)
    assert torch.equal(alone.entropy, with_top.entropy)
    assert alone.top_ids.shape == (46, 0) and with_top.top_ids.shape == (46, 3)
