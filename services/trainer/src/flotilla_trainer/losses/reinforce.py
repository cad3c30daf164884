"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def reinforce(tokens: PolicyTokens) -> TokenLosses:
    """-A log p; needs no log-probabilities of the rollout."""
    return TokenLosses(-tokens.advantages * tokens.logprobs, not_one(tokens))
