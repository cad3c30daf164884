"""Divergences with a gradient: from a reference, by sampled tokens or whole distributions, and from a teacher.

Invariant: the divergence from a teacher and its gradient are finite for any finite logits and log-probabilities. This
holds also where the likeliest tokens take all of the probability: zero, which has no logarithm, is left to the
others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""The log-ratio beyond which a reference that finds a token likelier does not change k3 any more."""

LEAST_TAIL = 1e-6
"""The smallest probability of the teacher's other tokens; a float32 sum of the likeliest ones is no more exact."""


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return one estimate for each sampled token: k1, k2 (square), k3 (never negative) or abs."""
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
    """Return for each row the sum over the vocabulary of p (log p - log q)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    distance: torch.Tensor = logprobs - torch.log_softmax(reference_logits, dim=-1)
    return (logprobs.exp() * distance).sum(-1)


class TeacherTop(NamedTuple):
    """The likeliest tokens of a teacher, one row for each scored token, and the direction of the divergence."""

    ids: torch.Tensor
    """Token ids, [tokens, k]."""
    logprobs: torch.Tensor
    """The log-probabilities of these tokens, [tokens, k]."""
    forward: bool
    """True weighs by the teacher's probabilities, False by the policy's."""
    tail: bool
    """True counts all other tokens together as one more."""

    def rows(self, chosen: torch.Tensor) -> TeacherTop:
        """Return the rows of the `chosen` tokens."""
        return self._replace(ids=self.ids[chosen], logprobs=self.logprobs[chosen])

    def split(self, tokens: int) -> list[TeacherTop]:
        """Split into parts of at most `tokens` rows."""
        parts = zip(self.ids.split(tokens), self.logprobs.split(tokens), strict=True)
        return [self._replace(ids=ids, logprobs=logprobs) for ids, logprobs in parts]


def teacher_divergence(logits: torch.Tensor, teacher: TeacherTop) -> torch.Tensor:
    """Return for each row the sum of q (log q - log p) or of p (log p - log q), q the teacher and p the policy."""
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
    """Return the log of the share of all other tokens in the sum of exponentials.

    One minus a probability of almost one would be mere rounding. The lowest number in place of minus infinity keeps
    the gradient finite where there are no others.
    """
    others = logits.scatter(-1, ids, torch.finfo(logits.dtype).min)
    return torch.logsumexp(others, dim=-1, keepdim=True)
