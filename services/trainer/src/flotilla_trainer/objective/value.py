"""A critic's objective, applied to one update after the other.

Invariants: rewards are shaped and returns made by the very functions that make the policy's advantages, from the same
section and the same seed; an update changes nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import gae
from flotilla_core.config.advantages import GaeAdvantage
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective import policy_columns as columns
from flotilla_trainer.objective.base import (
    TOKEN_MEAN,
    SessionObjective,
    check_logprobs,
    check_reference,
    check_values,
)
from flotilla_trainer.wire.objective import ObjectiveSettings


class ValueUpdate(SessionObjective):
    """Trains a critic on the returns of rollouts."""

    writes_samples = False
    """The versions of their tokens are the policy's, which may have moved when the critic could not."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        policy = settings.policy
        assert policy is not None and isinstance(policy.advantage, GaeAdvantage), "checked: it has a critic"
        self._policy, self._advantage = policy, policy.advantage
        self._limit = settings.max_response_tokens

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Make sequences with old values, returns and weights, each part with its own denominator, and metrics."""
        check_values(batch, self._advantage)
        assert batch.values is not None, "checked"
        kept = columns.kept_samples(batch, self._policy.advantage)
        outcomes, _ = columns.outcomes_of(
            batch, self._policy, self._limit, kept, seed, self._penalties(batch)
        )
        _, returns = gae(outcomes, batch.values, **self._advantage.arguments)
        made: dict[str, NDArray[Any]] = {
            "old_values": batch.values,
            "returns": returns,
            "weights": columns.part_weights(TOKEN_MEAN, batch, batch.trained, parts),
        }
        return batch.sequences(made), _metrics(batch.values[batch.trained], returns[batch.trained])

    def _penalties(self, batch: UpdateBatch) -> NDArray[np.float64] | None:
        """Return what the divergence from the reference subtracts from the reward of each token."""
        kl = self._policy.kl
        if kl.placement != "reward":
            return None
        check_logprobs(batch, "a divergence in the reward")
        check_reference(batch, "a divergence in the reward")
        return kl.coefficient * columns.reference_divergence(batch, kl.estimator)


def _metrics(values: NDArray[Any], returns: NDArray[Any]) -> dict[str, float]:
    """Measure how well the values predicted the returns."""
    spread = float(returns.var())
    missed = float((returns - values).var())
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": 1.0 - missed / spread if spread else 0.0,
    }
