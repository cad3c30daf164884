"""Divergences with a gradient: from a reference, by sampled tokens or whole distributions, and from a teacher.

Invariant: the divergence from a teacher is finite, and so is its gradient, for any finite logits and log-probabilities;
what is sure to the last digit leaves a tail of nothing, and nothing has no logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""From where on a reference that finds a token likelier changes k3 no more."""

LEAST_TAIL = 1e-6
"""What float32 can tell of a teacher's probability beside its likeliest tokens: a sum of them is not more exact."""


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token, of samples of the policy: k1, k2 (square), k3 (never negative) or abs."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"there is no estimator {estimator!r}")


def full_divergence(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """One a row: the sum over the vocabulary of p (log p - log q)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    distance: torch.Tensor = logprobs - torch.log_softmax(reference_logits, dim=-1)
    return (logprobs.exp() * distance).sum(-1)


class TeacherTop(NamedTuple):
    """What a teacher says, one row a scored token, and how the policy is held to it."""

    ids: torch.Tensor
    """[tokens, k]."""
    logprobs: torch.Tensor
    """[tokens, k]."""
    forward: bool
    """By the teacher's probabilities, and not by the policy's."""
    tail: bool
    """All other tokens together count as one more."""

    def rows(self, chosen: torch.Tensor) -> TeacherTop:
        """Of some of the tokens."""
        return self._replace(ids=self.ids[chosen], logprobs=self.logprobs[chosen])

    def split(self, tokens: int) -> list[TeacherTop]:
        """So many tokens at a time."""
        parts = zip(self.ids.split(tokens), self.logprobs.split(tokens), strict=True)
        return [self._replace(ids=ids, logprobs=logprobs) for ids, logprobs in parts]


def teacher_divergence(logits: torch.Tensor, teacher: TeacherTop) -> torch.Tensor:
    """One a row: the sum of q (log q - log p) or of p (log p - log q), q the teacher and p the policy."""
    ids, theirs = teacher.ids, teacher.logprobs.to(logits.dtype)
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    ours = logits.gather(-1, ids) - normalizer
    if teacher.tail and ids.shape[-1] < logits.shape[-1]:
        ours = torch.cat([ours, _others(logits, ids) - normalizer], dim=-1)
        left = 1.0 - theirs.exp().sum(-1, keepdim=True)
        theirs = torch.cat([theirs, left.clamp(min=LEAST_TAIL).log()], dim=-1)
    if teacher.forward:
        return (theirs.exp() * (theirs - ours)).sum(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def _others(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log of what all other tokens add to the sum of exponentials.

    The rest of a probability of almost one would be rounding; the lowest number in place of minus infinity keeps the
    gradient finite where others have nothing.
    """
    others = logits.scatter(-1, ids, torch.finfo(logits.dtype).min)
    return torch.logsumexp(others, dim=-1, keepdim=True)
