"""Every policy loss that a run can name: what it is a function of, the losses one by one, and the table of their names.

Invariants: each loss takes the tokens of a micro-batch and its parameters by keyword, and gives one number a token,
neither weighted nor averaged; what it knows of the update beyond its micro-batch came with the tokens. Tokens have one
row a trained token; a sequence lies in one piece and whole in its micro-batch, so whatever is summed or averaged over
it does not depend on the cuts; only `logprobs` carries a gradient; a token that does not count adds nothing to its
sequence, and no ratio is larger than a float can multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""Of one token; what has moved further has a constant ratio, and so no gradient through it."""
MAX_MEAN_LOG_RATIO = 10.0
"""Of the mean over a sequence."""


class PolicyTokens(NamedTuple):
    """The trained tokens of a micro-batch."""

    logprobs: torch.Tensor
    """Under the policy that is trained."""
    old_logprobs: torch.Tensor
    """Under the policy that the ratio compares with."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """For each token the number of its sequence, counted from 0 within the micro-batch."""
    selected: torch.Tensor | None = None
    """Tokens that the front chose, for losses that treat some differently."""
    counted: torch.Tensor | None = None
    """Tokens with a weight above 0; without it all of them. Both log-probabilities of the others are 0."""
    segments: torch.Tensor | None = None
    """As `sequences`, for the stretches of a sequence that the policy wrote without context in between (turns); there
    where the loss or a correction asks for them."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log of the probability now over the probability then, however far apart they are."""
        return self.logprobs - self.old_logprobs

    @property
    def ratio(self) -> torch.Tensor:
        """The probability now over the probability then, at most exp(20)."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    def sequence_ratio(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Exp of the mean of `log_ratio` over a sequence, at most exp(10).

        Each token carries the value of its sequence and its own share of the gradient, so that its weight scales its
        own gradient, and tokens of one sequence may differ in advantage. Where they do not, the mean over the sequence
        is the sequence's own loss and gradient.
        """
        constant = log_ratio.detach()
        mean = self.sequence_means(constant)
        return (mean + (log_ratio - constant)).clamp(max=MAX_MEAN_LOG_RATIO).exp()

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum of `values` over the counted tokens of its sequence."""
        counted = values if self.counted is None else torch.where(self.counted, values, 0.0)
        return sequence_sums(counted, self.sequences)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean of `values` over the counted tokens of its sequence."""
        counts = self.sequence_sums(torch.ones_like(values))
        return self.sequence_sums(values) / counts.clamp(min=1.0)


class TokenLosses(NamedTuple):
    """One row a token, neither weighted nor averaged."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Tokens whose gradient a clip or a mask removed."""


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` over its sequence."""
    # A micro-batch may hold context alone.
    count = int(sequences[-1]) + 1 if sequences.numel() else 0
    return values.new_zeros(count).index_add(0, sequences, values)[sequences]


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token the mean of `values` over its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def not_one(tokens: PolicyTokens) -> torch.Tensor:
    """No token at all, for losses that clip nothing."""
    return torch.zeros_like(tokens.logprobs, dtype=torch.bool)


def reinforce(tokens: PolicyTokens) -> TokenLosses:
    """REINFORCE: the plain policy gradient.

    -A log p; needs no log-probabilities of the rollout.
    """
    return TokenLosses(-tokens.advantages * tokens.logprobs, not_one(tokens))


def ppo(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLosses:
    """PPO: the pessimistic minimum of the plain and the clipped objective; also the loss of GRPO and DAPO.

    -min(r A, clip(r, 1 - low, 1 + high) A); with dual clip, for A < 0, at most -c A.

    Where the policy is the one that sampled, r is 1 and the gradient that of REINFORCE with these advantages.
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
    """GSPO: one ratio a sequence, or a turn of it, the geometric mean of its tokens' ratios.

    -min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log r), over the `sequence` or over each `segment`.
    """
    if over == "segment":
        assert tokens.segments is not None, "the front cuts sequences for this loss"
        tokens = tokens._replace(sequences=tokens.segments)
    ratio = tokens.sequence_ratio(tokens.log_ratio)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    return TokenLosses(-torch.minimum(plain, bounded), bounded < plain)


def gmpo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """GMPO: the geometric mean of clipped token ratios, which single tokens cannot rule.

    -A exp(mean of clipped log r): at most +high where A > 0, at least -low where A < 0 (limits of the log).
    """
    log_ratio = tokens.log_ratio
    bounded = torch.where(
        tokens.advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    return TokenLosses(-tokens.advantages * tokens.sequence_ratio(bounded), bounded != log_ratio)


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """CISPO: importance weights are clipped, gradients of tokens never are.

    -w A log p with the constant w = clip(r, 1 - low, 1 + high); a token at the limit still teaches.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def sapo(tokens: PolicyTokens, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """SAPO: a soft gate in place of the clip.

    -(4 / tau) sigmoid(tau (r - 1)) A, whose gradient fades with distance; tau by the sign of A.
    """
    tau = torch.full_like(tokens.advantages, tau_positive)
    tau = torch.where(tokens.advantages > 0, tau, torch.full_like(tau, tau_negative))
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0)) * 4.0 / tau
    return TokenLosses(-gate * tokens.advantages, not_one(tokens))


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Clip-Cov: PPO whose tokens of high covariance give no gradient, so that entropy lasts longer.

    The clipped loss, zero where the front selected the token by its covariance.
    """
    assert tokens.selected is not None, "the front selects tokens for this loss"
    loss, clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return TokenLosses(torch.where(tokens.selected, 0.0, loss), clipped | tokens.selected)


def kl_cov(tokens: PolicyTokens, *, penalty: float) -> TokenLosses:
    """KL-Cov: the plain surrogate, with a penalty on tokens of high covariance, so that entropy lasts longer.

    -r A, and penalty |log r| more where the front selected the token by its covariance.
    """
    assert tokens.selected is not None, "the front selects tokens for this loss"
    surrogate = -tokens.ratio * tokens.advantages
    distance = penalty * tokens.log_ratio.abs()
    return TokenLosses(surrogate + torch.where(tokens.selected, distance, 0.0), not_one(tokens))


def dppo_tv(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """DPPO: trust region by the divergence of the two policies, in place of the ratio.

    -r A, masked where the token's probability has moved by more than the limit in the direction of A.
    """
    moved = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    return _masked(tokens, moved > _limits(tokens, limit, limit_low), ratio_cap)


def dppo_kl(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """The same, by the KL divergence between "this token" and "another one", then against now."""
    now, then = tokens.logprobs.detach(), tokens.old_logprobs
    divergence = then.exp() * (then - now) + _other(then).exp() * (_other(then) - _other(now))
    return _masked(tokens, divergence > _limits(tokens, limit, limit_low), ratio_cap)


def _limits(tokens: PolicyTokens, limit: float, limit_low: float | None) -> torch.Tensor:
    """One a token: `limit_low` where the advantage is not positive."""
    limits = torch.full_like(tokens.advantages, limit)
    return limits if limit_low is None else torch.where(tokens.advantages > 0, limits, limit_low)


def _other(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probability of every other token together; kept finite where the token is certain."""
    return torch.log1p(-logprobs.exp().clamp(max=1.0 - 1e-7))


def _masked(tokens: PolicyTokens, far: torch.Tensor, ratio_cap: float | None) -> TokenLosses:
    ratio = tokens.ratio
    stopped = far & ((ratio.detach() - 1.0) * tokens.advantages > 0)
    if ratio_cap is not None:
        # The truncated ratio is a constant weight: beyond the cap a token goes on learning, at that strength.
        ratio = ratio.detach().clamp(max=ratio_cap) * (1.0 + (tokens.logprobs - tokens.logprobs.detach()))
    return TokenLosses(torch.where(stopped, 0.0, -ratio * tokens.advantages), stopped)


def topr(tokens: PolicyTokens, *, negative_cap: float) -> TokenLosses:
    """TOPR: tapered off-policy REINFORCE.

    -w A log p; w is 1 for good sequences, and the sequence's whole ratio, at most `negative_cap`, for bad ones.

    What is good is learned at full strength however unlikely it has become; what is bad is forgotten only as far as
    the policy would still say it.
    """
    ratio = tokens.sequence_sums(tokens.log_ratio.detach()).exp()
    good = tokens.advantages >= 0
    weight = torch.where(good, 1.0, ratio.clamp(max=negative_cap))
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ~good & (ratio > negative_cap))


def kimi(tokens: PolicyTokens, *, tau: float) -> TokenLosses:
    """Kimi k1.5: policy mirror descent with a quadratic pull towards the policy that sampled.

    Over a sequence: -A log r + tau / 2 (log r)^2, with log r summed over its tokens.

    Each token carries its own share of the first term, an equal share of the second and its own share of the gradient.
    """
    log_ratio = tokens.log_ratio
    constant = log_ratio.detach()
    total = tokens.sequence_sums(constant)
    # The mean times the sum is the square of the sum over the number of tokens.
    pull = 0.5 * tokens.sequence_means(constant) * total + total * (log_ratio - constant)
    return TokenLosses(-tokens.advantages * log_ratio + tau * pull, not_one(tokens))


def dro(tokens: PolicyTokens, *, beta: float) -> TokenLosses:
    """DRO: direct reward optimisation, REINFORCE with a quadratic pull of every token towards the policy that sampled.

    -A log p + beta / 2 (log r)^2, each token by itself.
    """
    pull = 0.5 * beta * tokens.log_ratio.square()
    return TokenLosses(-tokens.advantages * tokens.logprobs + pull, not_one(tokens))


def raft_plus_plus(tokens: PolicyTokens, *, clip_high: float) -> TokenLosses:
    """RAFT++: reward-ranked fine-tuning on good samples alone, with importance ratios and the clip of PPO.

    -min(r, 1 + high) A where A > 0, and 0 elsewhere: bad samples are not unlearnt, so no floor is needed.
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
