"""The distance of a policy from the reference: Schulman's estimators on sampled tokens, or the full divergence.

From a teacher: over the tokens that it finds likeliest.
"""

from __future__ import annotations

import torch

from flotilla_core.config.training import TeacherConfig


def estimated(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token, of tokens that the policy p drew, with the ratio q / p of the reference q."""
    log_ratio = reference - logprobs
    ratio = torch.exp(log_ratio)
    return {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": ratio - 1 - log_ratio,
        "abs": log_ratio.abs(),
    }[estimator]


def whole(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token: the expectation under p of log p - log q."""
    p, q = torch.softmax(logits, dim=-1), torch.softmax(reference, dim=-1)
    return (p * (torch.log(p) - torch.log(q))).sum(-1)


def from_teacher(
    section: TeacherConfig, logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> torch.Tensor:
    """One a token, over the first `top_k` of the ids, which a teacher q finds likeliest and which name every token."""
    p = torch.softmax(logits, dim=-1).gather(-1, ids)
    q = torch.exp(logprobs)
    named = min(section.top_k, logits.shape[-1])
    outcomes = [(p[:, place], q[:, place]) for place in range(named)]
    if section.tail and named < logits.shape[-1]:
        outcomes.append((p[:, named:].sum(-1), 1 - q[:, :named].sum(-1)))
    if section.divergence == "forward":
        return torch.stack([theirs * torch.log(theirs / ours) for ours, theirs in outcomes]).sum(0)
    return torch.stack([ours * torch.log(ours / theirs) for ours, theirs in outcomes]).sum(0)


def adapted(
    coefficient: float, measured: float, *, target: float, horizon_samples: int, samples: int
) -> float:
    """The proportional controller of Ziegler et al.: the error is bounded to a fifth either way."""
    error = max(-0.2, min(0.2, measured / target - 1))
    return coefficient * (1 + error * samples / horizon_samples)
