"""Small models of one shape whose weights have nothing to do with each other, and how far samples are from them.

Invariant: the same seed makes the same weights, and any tensor that another seed made shows at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flotilla_weights.manifest import Manifest

BUCKET_BYTES = 1 << 19
Tensors = dict[str, torch.Tensor]


class Sampled(Protocol):
    """The output of a generator."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The token ids of the response."""

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """The log-probability of each token, at the temperature."""


def make_model(seed: int) -> Any:
    """Return a tied Qwen3 in which a stale tensor is never close to the right one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    build: Any = Qwen3ForCausalLM
    model = build(config).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.08 + ("norm" in name))
    return model


def tensors_of(model: torch.nn.Module) -> Tensors:
    """Return its weights by name, without gradients."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def manifest_of(tensors: Tensors) -> Manifest:
    """Return the announcement of a sender of these weights."""
    return Manifest.from_named(((n, t.dtype, t.shape) for n, t in tensors.items()), BUCKET_BYTES)


def first_tokens(end: int, sample: Any) -> Any:
    """Return the sample up to a token."""
    return replace(sample, token_ids=sample.token_ids[:end], logprobs=sample.logprobs[:end])


@torch.no_grad()
def difference(model: Any, prompt: list[int], sample: Sampled, temperature: float, start: int = 0) -> float:
    """Largest difference of logprobs from token `start` on."""
    ids = torch.tensor([prompt + sample.token_ids.tolist()])
    logprobs = torch.log_softmax(model(ids).logits[0].double() / (temperature or 1.0), -1)
    ours = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(sample.token_ids).long()[:, None])[:, 0]
    return float((ours - torch.tensor(sample.logprobs)).abs()[start:].max())
