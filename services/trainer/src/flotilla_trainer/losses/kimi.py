"""Kimi k1.5: policy mirror descent with a quadratic pull towards the policy that sampled."""

from __future__ import annotations

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def kimi(tokens: PolicyTokens, *, tau: float) -> TokenLosses:
    """Over a sequence: -A log r + tau / 2 (log r)^2, with log r summed over its tokens.

    Each token carries its own share of the first term, an equal share of the second and its own share of the gradient.
    """
    log_ratio = tokens.log_ratio
    constant = log_ratio.detach()
    total = tokens.sequence_sums(constant)
    # The mean times the sum is the square of the sum over the number of tokens.
    pull = 0.5 * tokens.sequence_means(constant) * total + total * (log_ratio - constant)
    return TokenLosses(-tokens.advantages * log_ratio + tau * pull, not_one(tokens))
