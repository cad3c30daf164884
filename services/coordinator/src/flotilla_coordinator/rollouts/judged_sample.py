"""A sample and what the rewards made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flotilla_coordinator.ledger.records import REWARD_ERROR, REWARD_TIMEOUT
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome


@dataclass(frozen=True)
class JudgedSample:
    """It may train where its outcome is a value."""

    sample: RolloutSample
    outcome: Outcome

    @property
    def drop_reason(self) -> str:
        """Why it cannot train; empty where it has a value."""
        if self.outcome.total is not None:
            return ""
        return REWARD_TIMEOUT if self.outcome.timed_out else REWARD_ERROR

    def against(self, greedy: Outcome) -> JudgedSample:
        """The same beside the greedy response to its prompt: where that one has no value, neither has this."""
        self.sample.greedy_reward = greedy.total
        if greedy.total is not None or self.outcome.total is None:
            return self
        failure = f"the greedy response to its prompt: {greedy.failure}"
        return replace(self, outcome=replace(greedy, failure=failure))
