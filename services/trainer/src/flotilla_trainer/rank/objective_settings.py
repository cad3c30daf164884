"""What the ranks have to know of a session's objective.

Invariant: made by the front from checked sections; everything that depends on a whole update comes with the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SUPERVISED = "sft"
VALUE = "value"
REWARD = "reward"
FULL_DIVERGENCE = "full"
FORWARD, REVERSE = "forward", "reverse"
"""Of a divergence from a teacher: by the teacher's probabilities, or by the policy's."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """Loss, correction and bonuses of one session."""

    loss: str = SUPERVISED
    """`sft` (minus the weighted log-probabilities), `value`, `reward`, a policy loss of ours, or path.py:function."""
    parameters: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    ratio_to_trainer: bool = False
    """The ratio compares with the trainer's own log-probabilities before the update and not with the rollout's."""
    importance: str = ""
    """token, segment, sequence, icepop or icepop_sequence; empty is off."""
    importance_cap: float = 0.0
    importance_floor: float = 0.0
    sequence_low: float | None = None
    sequence_high: float | None = None
    rejections: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of `within`, one set for each."""
    kl_estimator: str = ""
    """Of the divergence in the loss."""
    keeps_reference: bool = False
    """Whether the ranks keep the weights that the session started from."""
    teacher_divergence: str = ""
    """forward or reverse, over the tokens that a teacher finds likeliest; empty is off."""
    teacher_tail: bool = False
    """Whether all other tokens count as one more there."""
    entropy_coefficient: float = 0.0
    fail_at: float | None = None
    """Mean difference of probabilities from which an update is refused."""

    @property
    def compares_distributions(self) -> bool:
        """Whether the divergence is that of the whole distributions, which the reference has to give for each token."""
        return self.kl_estimator == FULL_DIVERGENCE

    @property
    def supervised(self) -> bool:
        """Whether the tokens are given answers, to be raised or lowered by the weights of the front."""
        return self.loss == SUPERVISED
