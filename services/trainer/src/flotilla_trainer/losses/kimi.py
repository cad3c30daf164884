"""Kimi k1.5: policy mirror descent with a quadratic pull towards the policy that sampled."""

from __future__ import annotations

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def kimi(tokens: PolicyTokens, *, tau: float) -> TokenLosses:
    """Over a sequence: -A log r + tau / 2 (log r)^2, with log r summed over its tokens.

    Each token carries its own share of the first term and an equal share of the second.
    """
    log_ratio = tokens.log_ratio
    # The mean times the sum is the square of the sum over the number of tokens.
    share = tokens.sequence_means(log_ratio) * tokens.sequence_sums(log_ratio)
    return TokenLosses(-tokens.advantages * log_ratio + 0.5 * tau * share, not_one(tokens))
