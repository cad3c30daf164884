"""PPO: the pessimistic minimum of the plain and the clipped objective; also the loss of GRPO and DAPO."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def ppo(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with dual clip, for A < 0, at most -c A.

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
