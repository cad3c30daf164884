"""Many small Qwen3 models of one shape as one batch: each weight has a first dimension, the copy.

Invariant: row m of whatever goes in or comes out belongs to copy m alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
Weights = dict[str, Tensor]
Cache = dict[int, tuple[Tensor, Tensor]]


class Shape(NamedTuple):
    """What the weights do not say themselves."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int
    theta: float


def load(folder: Path, copies: int, device: str) -> tuple[Weights, Shape]:
    """Return `copies` of the model in a folder, with a tied head."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    weights = {"embedding": stored["model.embed_tokens.weight"], "norm": stored["model.norm.weight"]}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in NAMES.items():
            weight = stored[f"model.layers.{layer}.{theirs}.weight"]
            weights[f"{ours}{layer}"] = weight.T.contiguous() if weight.dim() == 2 else weight
    shape = Shape(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["rope_parameters"]["rope_theta"],
    )
    spread = {name: one.to(device).repeat(copies, *[1] * one.dim()) for name, one in weights.items()}
    return spread, shape


def logits(
    weights: Weights, shape: Shape, tokens: Tensor, counts: Tensor, cache: Cache | None = None
) -> Tensor:
    """Of `tokens` [copy, row, place], which follow those in `cache`; `counts` says of all of them which count."""
    return torch.einsum("mrth,mvh->mrtv", states(weights, shape, tokens, counts, cache), weights["embedding"])


def states(
    weights: Weights, shape: Shape, tokens: Tensor, counts: Tensor, cache: Cache | None = None
) -> Tensor:
    """What the head of the model reads."""
    copies, rows, length = tokens.shape
    start = counts.shape[2] - length
    x = torch.gather(
        weights["embedding"], 1, tokens.reshape(copies, -1, 1).expand(-1, -1, weights["norm"].shape[1])
    )
    x = x.view(copies, rows, length, -1)
    places = torch.arange(start, counts.shape[2], device=tokens.device)
    earlier = torch.arange(counts.shape[2], device=tokens.device) <= places[:, None]
    mask = earlier & counts[:, :, None]
    for layer in range(shape.layers):
        x = x + _attention(weights, shape, layer, x, places, mask, cache)
        inner = _norm(x, weights[f"before_mlp{layer}"])
        gated = functional.silu(_linear(inner, weights[f"gate{layer}"])) * _linear(
            inner, weights[f"up{layer}"]
        )
        x = x + _linear(gated, weights[f"down{layer}"])
    return _norm(x, weights["norm"])


def _attention(
    weights: Weights, shape: Shape, layer: int, x: Tensor, places: Tensor, mask: Tensor, cache: Cache | None
) -> Tensor:
    inner = _norm(x, weights[f"before_attention{layer}"])

    def heads(name: str, count: int) -> Tensor:
        return _linear(inner, weights[f"{name}{layer}"]).unflatten(3, (count, shape.head_dim))

    query = _turned(_norm(heads("query", shape.heads), weights[f"query_norm{layer}"]), places, shape.theta)
    key = _turned(_norm(heads("key", shape.key_heads), weights[f"key_norm{layer}"]), places, shape.theta)
    value = heads("value", shape.key_heads)
    if cache is not None:
        if layer in cache:
            key, value = (torch.cat(pair, 2) for pair in zip(cache[layer], (key, value), strict=True))
        cache[layer] = (key, value)
    query = query.unflatten(3, (shape.key_heads, -1))
    scores = torch.einsum("mrtkgd,mrskd->mrkgts", query, key) * shape.head_dim**-0.5
    shares = scores.masked_fill(~mask[:, :, None, None], -1e9).softmax(-1)
    return _linear(torch.einsum("mrkgts,mrskd->mrtkgd", shares, value).flatten(3), weights[f"out{layer}"])


def _turned(x: Tensor, places: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = places[:, None] * theta ** (-torch.arange(half, device=x.device) / half)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    scale = weight.view(weight.shape[0], *[1] * (x.dim() - 2), -1)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])
