"""Corrections for the difference between the policy that sampled and the policy that is trained."""

from __future__ import annotations

import torch

from flotilla_core.config.algorithm import CorrectionConfig, RejectionConfig


def proximal_logprobs(
    correction: CorrectionConfig,
    rollout: torch.Tensor,
    before: torch.Tensor,
    now: torch.Tensor,
    staleness: torch.Tensor,
    gone: float,
) -> torch.Tensor:
    """Return the denominator of the ratio; `gone` is the share of the update's steps that were made."""
    if correction.proximal == "rollout":
        return rollout
    if correction.proximal == "trainer":
        return before
    share = staleness / (staleness + gone) if gone else torch.ones_like(staleness)
    return (1 - share) * rollout + share * now.detach()


def token_weights(
    correction: CorrectionConfig,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    together: torch.Tensor,
    segment: torch.Tensor,
) -> torch.Tensor:
    """The constant weight of each token, by w = p_trainer / p_rollout; `together` and `segment` say what is one."""
    log_ratio = trainer - rollout
    weight = importance(correction, log_ratio, together, segment)
    geometric_mean = torch.exp(together @ log_ratio / together.sum(1))
    if correction.sequence_low is not None:
        weight = weight * (geometric_mean >= correction.sequence_low)
    if correction.sequence_high is not None:
        weight = weight * (geometric_mean <= correction.sequence_high)
    for rejection in correction.rejection:
        weight = weight * accepted(rejection, trainer, rollout, together)
    return weight


def importance(
    correction: CorrectionConfig, log_ratio: torch.Tensor, together: torch.Tensor, segment: torch.Tensor
) -> torch.Tensor:
    """Truncated to the cap, or left out beyond the limits, of a token, a turn or a sequence."""
    cap, floor = correction.importance_cap, correction.importance_floor
    ratio = torch.exp(log_ratio)
    product = torch.exp(together @ log_ratio)
    return {
        "none": torch.ones_like(ratio),
        "token": ratio.clip(max=cap),
        "segment": torch.exp(segment @ log_ratio).clip(max=cap),
        "sequence": product.clip(max=cap),
        "icepop": ratio * ((ratio >= floor) & (ratio <= cap)),
        "icepop_sequence": product * ((product >= floor) & (product <= cap)),
    }[correction.importance]


def mean_importance(
    correction: CorrectionConfig, log_ratio: torch.Tensor, together: torch.Tensor, segment: torch.Tensor
) -> float:
    """Return the mean weight of all tokens, turns or sequences, whichever have one weight."""
    weight = importance(correction, log_ratio, together, segment)
    same = {"segment": segment, "sequence": together, "icepop_sequence": together}.get(correction.importance)
    # What has n tokens counts n times in a sum over tokens, and once here.
    share = torch.ones_like(weight) if same is None else 1 / same.sum(1)
    mean = ((weight * share).sum() / share.sum()).item() if len(weight) else 0.0
    return mean or 1.0


def accepted(
    rejection: RejectionConfig, trainer: torch.Tensor, rollout: torch.Tensor, together: torch.Tensor
) -> torch.Tensor:
    """Return whether a token, or its sequence, is within the limits."""
    log_ratio = trainer - rollout
    ratio = torch.exp(log_ratio)
    measured = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": ratio - 1 - log_ratio,
        "difference": torch.exp(trainer) - torch.exp(rollout),
    }[rejection.measure]
    if rejection.over == "sequence_sum":
        measured = together @ measured
    if rejection.over == "sequence_mean":
        measured = together @ measured / together.sum(1)
    if rejection.measure == "k1":
        measured = torch.exp(measured)
    outside = torch.zeros_like(measured, dtype=torch.bool)
    if rejection.low is not None:
        outside |= measured < rejection.low
    if rejection.high is not None:
        outside |= measured > rejection.high
    if rejection.over == "sequence_max":
        outside = together @ outside.double() > 0
    return ~outside
