"""DRO: direct reward optimisation, REINFORCE with a quadratic pull of every token towards the policy that sampled."""

from __future__ import annotations

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def dro(tokens: PolicyTokens, *, beta: float) -> TokenLosses:
    """-A log p + beta / 2 (log r)^2, each token by itself."""
    pull = 0.5 * beta * tokens.log_ratio.square()
    return TokenLosses(-tokens.advantages * tokens.logprobs + pull, not_one(tokens))
