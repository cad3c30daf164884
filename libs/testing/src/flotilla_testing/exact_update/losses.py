"""Every policy loss by its paper's formula, one number a trained token, in torch, which gives the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from flotilla_core.config import CriticConfig
from flotilla_testing.exact_update.lookup import formula_of
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


class Tokens(NamedTuple):
    """The trained tokens of one optimizer step."""

    now: torch.Tensor
    """Log-probabilities under the policy that is trained; carries the gradient."""
    old: torch.Tensor
    """Log-probabilities that the ratio compares with."""
    advantages: torch.Tensor
    together: torch.Tensor
    """[tokens, tokens]: 1 where the second is of the first one's sequence, and counts."""
    segment: torch.Tensor
    """[tokens, tokens]: the same for the stretches of a sequence without context in between."""
    selected: torch.Tensor
    """Tokens that were chosen by their covariance."""

    @property
    def ratio(self) -> torch.Tensor:
        """Return p / p_old of each token."""
        return torch.exp(self.now - self.old)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum over its sequence."""
        return self.together @ values

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean over its sequence."""
        return self.sums(values) / self.together.sum(1).clip(min=1)

    def shared(self, of_sequence: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the exponential of a number of the sequence, whose gradient each token carries by its own share."""
        return torch.exp(of_sequence.detach()) * torch.exp(own - own.detach())


def ppo(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> torch.Tensor:
    """-min(r A, clip(r) A), and with dual clip c for A < 0: -max(min(r A, clip(r) A), c A)."""
    a, r = tokens.advantages, tokens.ratio
    gain = torch.min(r * a, torch.clip(r, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        gain = torch.where(a < 0, torch.max(gain, dual_clip * a), gain)
    return -gain


def reinforce(tokens: Tokens) -> torch.Tensor:
    """-A log p."""
    return -tokens.advantages * tokens.now


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float, over: str) -> torch.Tensor:
    """GSPO-token: s = sg(exp(mean of log r)) p / sg(p), then as PPO."""
    if over == "segment":
        tokens = tokens._replace(together=tokens.segment)
    log_ratio, a = tokens.now - tokens.old, tokens.advantages
    s = tokens.shared(tokens.means(log_ratio), log_ratio)
    return -torch.min(s * a, torch.clip(s, 1 - clip_low, 1 + clip_high) * a)


def gmpo(tokens: Tokens, *, clip_low: float, clip_high: float) -> torch.Tensor:
    """-A times the geometric mean of the ratios, each bounded on the side where it would help."""
    log_ratio, a = tokens.now - tokens.old, tokens.advantages
    above, below = torch.clip(log_ratio, max=clip_high), torch.clip(log_ratio, min=-clip_low)
    bounded = torch.where(a > 0, above, below)
    return -a * tokens.shared(tokens.means(bounded), bounded)


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> torch.Tensor:
    """-sg(clip(r)) A log p."""
    return -torch.clip(tokens.ratio.detach(), 1 - clip_low, 1 + clip_high) * tokens.advantages * tokens.now


def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A."""
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative).double()
    return -4 / tau / (1 + torch.exp(-tau * (tokens.ratio - 1))) * tokens.advantages


def clip_cov(tokens: Tokens, *, clip_low: float, clip_high: float, **choice: float) -> torch.Tensor:
    """PPO, without the tokens that were drawn."""
    plain = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return torch.where(tokens.selected, torch.zeros_like(plain), plain)


def kl_cov(tokens: Tokens, *, penalty: float, **choice: float) -> torch.Tensor:
    """-r A, and penalty |log r| for the tokens of highest covariance."""
    plain = -tokens.ratio * tokens.advantages
    return torch.where(tokens.selected, plain + penalty * (tokens.now - tokens.old).abs(), plain)


def dppo_tv(
    tokens: Tokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> torch.Tensor:
    """-r A, without tokens whose probability has moved by more than the limit, in the direction of A."""
    p, q = torch.exp(tokens.now.detach()), torch.exp(tokens.old)
    return _inside(tokens, (p - q).abs(), limit, limit_low, ratio_cap)


def dppo_kl(
    tokens: Tokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> torch.Tensor:
    """The same by the divergence of (q, 1 - q) from (p, 1 - p)."""
    p, q = torch.exp(tokens.now.detach()), torch.exp(tokens.old)
    moved = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    return _inside(tokens, moved, limit, limit_low, ratio_cap)


def _inside(
    tokens: Tokens, moved: torch.Tensor, limit: float, limit_low: float | None, ratio_cap: float | None
) -> torch.Tensor:
    r, a = tokens.ratio, tokens.advantages
    outward = ((r.detach() > 1) & (a > 0)) | ((r.detach() < 1) & (a < 0))
    far = torch.where(a > 0, moved > limit, moved > (limit if limit_low is None else limit_low))
    if ratio_cap is not None:
        # The gradient of -sg(min(r, c)) A log p, the value of -min(r, c) A.
        weight = r.detach().clip(max=ratio_cap)
        r = weight * (1 + tokens.now - tokens.now.detach())
    return torch.where(far & outward, torch.zeros_like(r), -r * a)


def topr(tokens: Tokens, *, negative_cap: float) -> torch.Tensor:
    """-w A log p: w is 1 for A >= 0, else the product of the sequence's ratios up to the cap."""
    product = torch.exp(tokens.sums((tokens.now - tokens.old).detach()))
    weight = torch.where(tokens.advantages >= 0, torch.ones_like(product), product.clip(max=negative_cap))
    return -weight * tokens.advantages * tokens.now


def kimi(tokens: Tokens, *, tau: float) -> torch.Tensor:
    """-A log r, and tau / 2 (log r of the sequence)^2: an equal share of its value, each token's own of its slope."""
    log_ratio = tokens.now - tokens.old
    whole = tokens.sums(log_ratio).detach()
    value = whole**2 / 2 / tokens.together.sum(1).clip(min=1)
    return -tokens.advantages * log_ratio + tau * (value + whole * (log_ratio - log_ratio.detach()))


def dro(tokens: Tokens, *, beta: float) -> torch.Tensor:
    """-A log p, and beta / 2 (log r)^2 of each token."""
    return -tokens.advantages * tokens.now + beta / 2 * (tokens.now - tokens.old) ** 2


def raft_plus_plus(tokens: Tokens, *, clip_high: float) -> torch.Tensor:
    """-min(r, 1 + high) A where A > 0: nothing else is learned from."""
    gain = torch.clip(tokens.ratio, max=1 + clip_high) * tokens.advantages
    return torch.where(tokens.advantages > 0, -gain, torch.zeros_like(gain))


FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
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


def losses_of(section: Any, tokens: Tokens, own: Callable[..., torch.Tensor]) -> torch.Tensor:
    """One a token; `own` is the function of the user's."""
    formula = formula_of(section.type, FORMULAS, own)
    return formula(tokens, **section.arguments)


def selected_by_covariance(
    section: Any, rollout_logprobs: Floats, advantages: Floats, counted: Bools, seed: int
) -> Bools:
    """Tokens that clip_cov draws or kl_cov punishes, by (log p - mean) (A - mean) over all counted tokens."""
    chosen = np.zeros(len(counted), np.bool_)
    if section.type not in ("clip_cov", "kl_cov") or not counted.any():
        return chosen
    p, a = rollout_logprobs, advantages
    covariance = (p - p[counted].mean()) * (a - a[counted].mean())
    wanted = int(section.share * counted.sum())
    if section.type == "kl_cov":
        order = sorted(np.flatnonzero(counted), key=lambda token: -covariance[token])
        chosen[order[:wanted]] = True
        return chosen
    inside = (covariance > section.covariance_low) & (covariance < section.covariance_high) & counted
    candidates = np.flatnonzero(inside)
    drawn = np.random.default_rng(seed).choice(candidates, min(wanted, len(candidates)), replace=False)
    chosen[drawn] = True
    return chosen


def critic_loss(
    critic: CriticConfig, rollouts: Rollouts, returns: Floats, values: torch.Tensor, inside: Bools
) -> torch.Tensor:
    """Half the squared distance of a critic from the returns, clipped as in PPO.

    The mean over the trained tokens inside.
    """
    own = torch.from_numpy(np.flatnonzero(rollouts.trained & inside))
    old = torch.from_numpy(rollouts.values)[own]
    wanted = torch.from_numpy(returns)[own]
    squares = (values[own] - wanted) ** 2
    if critic.value_clip is not None:
        near = torch.max(torch.min(values[own], old + critic.value_clip), old - critic.value_clip)
        squares = torch.max(squares, (near - wanted) ** 2)
    return squares.mean() / 2
