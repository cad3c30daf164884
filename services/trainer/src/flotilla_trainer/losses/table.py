"""All policy losses that a run can name, and the table of their names.

Invariants: each loss takes the tokens of a micro-batch and its parameters by keyword, and returns one number for each
token, neither weighted nor averaged; all that it uses of the update beyond its micro-batch comes with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flotilla_trainer.losses.policy_tokens import (
    PolicyTokens,
    TokenLosses,
    not_one,
)


def reinforce(tokens: PolicyTokens) -> TokenLosses:
    """Compute REINFORCE, the plain policy gradient.

    The loss is -A log p; it needs no log-probabilities of the rollout.
    """
    return TokenLosses(-tokens.advantages * tokens.logprobs, not_one(tokens))


def ppo(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLosses:
    """Compute PPO, the pessimistic minimum of the plain and the clipped objective; also the loss of GRPO and DAPO.

    The loss is -min(r A, clip(r, 1 - low, 1 + high) A); with dual clip, for A < 0, at most -c A.

    Where the policy is the one that sampled, r is 1 and the gradient is that of REINFORCE with these advantages.
    """
    ratio = tokens.ratio
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    objective, clipped = torch.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        floor = dual_clip * tokens.advantages
        too_bad = (tokens.advantages < 0) & (objective < floor)
        objective, clipped = torch.where(too_bad, floor, objective), clipped | too_bad
    return TokenLosses(-objective, clipped)


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float, over: str) -> TokenLosses:
    """Compute GSPO, which has one ratio for a sequence or a turn of it: the geometric mean of its tokens' ratios.

    The loss is -min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log r), over the `sequence` or each `segment`.
    """
    if over == "segment":
        assert tokens.segments is not None, "the front cuts sequences for this loss"
        tokens = tokens._replace(sequences=tokens.segments)
    ratio = tokens.sequence_ratio(tokens.log_ratio)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    return TokenLosses(-torch.minimum(plain, bounded), bounded < plain)


def gmpo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Compute GMPO, the geometric mean of clipped token ratios, which single tokens cannot dominate.

    The loss is -A exp(mean of clipped log r): at most +high where A > 0, at least -low where A < 0 (limits of the log).
    """
    log_ratio = tokens.log_ratio
    bounded = torch.where(
        tokens.advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    return TokenLosses(-tokens.advantages * tokens.sequence_ratio(bounded), bounded != log_ratio)


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Compute CISPO, which clips importance weights and never the gradients of tokens.

    The loss is -w A log p with the constant w = clip(r, 1 - low, 1 + high); a token at the limit still has a gradient.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def sapo(tokens: PolicyTokens, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """Compute SAPO, which has a soft gate in place of the clip.

    The loss is -(4 / tau) sigmoid(tau (r - 1)) A, whose gradient fades with distance; tau depends on the sign of A.
    """
    tau = torch.full_like(tokens.advantages, tau_positive)
    tau = torch.where(tokens.advantages > 0, tau, torch.full_like(tau, tau_negative))
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0)) * 4.0 / tau
    return TokenLosses(-gate * tokens.advantages, not_one(tokens))


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Compute Clip-Cov: PPO whose tokens of high covariance give no gradient, so that entropy lasts longer.

    The loss is that of PPO, but zero where the front selected the token by its covariance.
    """
    assert tokens.selected is not None, "the front selects tokens for this loss"
    loss, clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return TokenLosses(torch.where(tokens.selected, 0.0, loss), clipped | tokens.selected)


def kl_cov(tokens: PolicyTokens, *, penalty: float) -> TokenLosses:
    """Compute KL-Cov: the plain surrogate, with a penalty on tokens of high covariance, so that entropy lasts longer.

    The loss is -r A, plus penalty |log r| where the front selected the token by its covariance.
    """
    assert tokens.selected is not None, "the front selects tokens for this loss"
    surrogate = -tokens.ratio * tokens.advantages
    distance = penalty * tokens.log_ratio.abs()
    return TokenLosses(surrogate + torch.where(tokens.selected, distance, 0.0), not_one(tokens))


def dppo_tv(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """Compute DPPO, whose trust region is the total variation of the two policies, in place of the ratio.

    The loss is -r A, masked where the token's probability has moved by more than the limit in the direction of A.
    """
    moved = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    return _masked(tokens, moved > _limits(tokens, limit, limit_low), ratio_cap)


def dppo_kl(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """Compute DPPO with the KL divergence between "this token" and "another one", then against now."""
    now, then = tokens.logprobs.detach(), tokens.old_logprobs
    divergence = then.exp() * (then - now) + _other(then).exp() * (_other(then) - _other(now))
    return _masked(tokens, divergence > _limits(tokens, limit, limit_low), ratio_cap)


def _limits(tokens: PolicyTokens, limit: float, limit_low: float | None) -> torch.Tensor:
    """Return the limit of each token: `limit_low` where the advantage is not positive."""
    limits = torch.full_like(tokens.advantages, limit)
    return limits if limit_low is None else torch.where(tokens.advantages > 0, limits, limit_low)


def _other(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of all other tokens together, finite even where the token is certain."""
    return torch.log1p(-logprobs.exp().clamp(max=1.0 - 1e-7))


def _masked(tokens: PolicyTokens, far: torch.Tensor, ratio_cap: float | None) -> TokenLosses:
    ratio = tokens.ratio
    stopped = far & ((ratio.detach() - 1.0) * tokens.advantages > 0)
    if ratio_cap is not None:
        # The truncated ratio is a constant weight: beyond the cap a token still learns, with that weight.
        ratio = ratio.detach().clamp(max=ratio_cap) * (1.0 + (tokens.logprobs - tokens.logprobs.detach()))
    return TokenLosses(torch.where(stopped, 0.0, -ratio * tokens.advantages), stopped)


def topr(tokens: PolicyTokens, *, negative_cap: float) -> TokenLosses:
    """Compute TOPR, tapered off-policy REINFORCE.

    The loss is -w A log p; w is 1 for good sequences, and the sequence's whole ratio, at most `negative_cap`, for bad
    ones.

    The policy learns good sequences at full weight, however unlikely they have become. It unlearns bad ones only as
    far as it would still sample them.
    """
    ratio = tokens.sequence_sums(tokens.log_ratio.detach()).exp()
    good = tokens.advantages >= 0
    weight = torch.where(good, 1.0, ratio.clamp(max=negative_cap))
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ~good & (ratio > negative_cap))


def kimi(tokens: PolicyTokens, *, tau: float) -> TokenLosses:
    """Compute the loss of Kimi k1.5: policy mirror descent with a quadratic pull towards the policy that sampled.

    The loss of a sequence is -A log r + tau / 2 (log r)^2, with log r summed over its tokens.

    Each token carries its own share of the first term, an equal share of the second and its own share of the gradient.
    """
    log_ratio = tokens.log_ratio
    constant = log_ratio.detach()
    total = tokens.sequence_sums(constant)
    # The mean times the sum is the square of the sum over the number of tokens.
    pull = 0.5 * tokens.sequence_means(constant) * total + total * (log_ratio - constant)
    return TokenLosses(-tokens.advantages * log_ratio + tau * pull, not_one(tokens))


def dro(tokens: PolicyTokens, *, beta: float) -> TokenLosses:
    """Compute DRO, direct reward optimisation: REINFORCE with a quadratic pull towards the policy that sampled.

    The loss is -A log p + beta / 2 (log r)^2, for each token by itself.
    """
    pull = 0.5 * beta * tokens.log_ratio.square()
    return TokenLosses(-tokens.advantages * tokens.logprobs + pull, not_one(tokens))


def raft_plus_plus(tokens: PolicyTokens, *, clip_high: float) -> TokenLosses:
    """Compute RAFT++: reward-ranked fine-tuning on good samples alone, with importance ratios and the clip of PPO.

    The loss is -min(r, 1 + high) A where A > 0, and 0 elsewhere: bad samples are not unlearnt, so no floor is needed.
    """
    good, ratio = tokens.advantages > 0, tokens.ratio
    bounded = ratio.clamp(max=1.0 + clip_high)
    return TokenLosses(torch.where(good, -bounded * tokens.advantages, 0.0), good & (bounded < ratio))


PolicyLoss = Callable[..., TokenLosses]

LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "kimi": kimi,
    "dro": dro,
    "raft_plus_plus": raft_plus_plus,
}
