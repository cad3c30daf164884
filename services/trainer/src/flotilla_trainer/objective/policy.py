"""The objective of a policy, applied to one update after the other.

Invariants: an update changes nothing here but an adaptive coefficient and the history of rewards, and these only once
its step was made; what the objective needs and the update lacks is refused before a rank sees anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import RewardHistory, adapted_coefficient, compared_share, counted_units
from flotilla_core.config import PolicyConfig
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import sample_place
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective import policy_columns as columns
from flotilla_trainer.objective.base import (
    TOKEN_MEAN,
    WHOLE_UPDATES,
    SessionObjective,
    check_advantage,
    check_logprobs,
    check_reference,
    check_teacher_tokens,
)
from flotilla_trainer.wire.objective import ObjectiveSettings

Columns = dict[str, NDArray[Any]]
UNITS = {TOKEN_MEAN: "tokens", "token_sum": WHOLE_UPDATES}


class PolicyObjective(SessionObjective):
    """Learns from rollouts of the policy by their rewards."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        assert settings.policy is not None, "checked: it has rollouts"
        self._policy = settings.policy
        self.temperature = settings.temperature
        self.unit = UNITS.get(self._policy.aggregation.type, "sequences")
        self._limit = settings.max_response_tokens
        self.kl_coefficient = self._policy.kl.coefficient
        self._history = self._seen = RewardHistory()
        self._function = columns.advantage_function(self._policy.advantage.type)

    def scores_reference(self, batch: UpdateBatch) -> bool:
        """Return whether the ranks have to score the batch by the policy that the session started from."""
        if not self._samples_divergence or batch.reference_logprobs is not None:
            return False
        if self._policy.kl.reference == "service":
            check_reference(batch, "the divergence from it")
        return True

    def scores_policy(self, *, several_steps: bool) -> bool:
        """Return whether updates have to be scored by the policy before they train it.

        In a single step the forward pass of the step itself says what the policy was; but a mean over the whole update
        is needed before it.
        """
        correction = self._policy.correction
        return correction.proximal == "trainer" and (several_steps or correction.normalize_importance)

    def scores_distributions(self, batch: UpdateBatch) -> bool:
        """Return whether advantages need the policy's whole distribution at every token before the update."""
        return batch.advantages is None and self._policy.advantage.needs_distributions

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Sequences with their columns, and metrics; `policy` scores every response token.

        Each of the `parts`, masks of the response tokens, has its own denominator; without any the whole is one.
        """
        if self._needs_rollout_logprobs:
            check_logprobs(batch, f"the loss {self._policy.loss.type}")
        check_advantage(batch, self._policy.advantage)
        if self._policy.teacher is not None:
            check_teacher_tokens(batch, self._policy.teacher.top_k)
        made, metrics = self._columns(batch, seed, parts)
        if policy is not None:
            made["proximal_logprobs"] = policy
            if self._policy.correction.normalize_importance:
                counted = made["weights"] > 0
                mean = columns.importance_mean(batch, self._policy.correction, policy, counted)
                # The weights of the correction alone: neither the entropy nor a divergence is weighed by them.
                made["importance_scale"] = np.full(counted.size, 1.0 / mean)
                metrics["correction/normalized_by"] = mean
        elif self._policy.correction.proximal == "interpolated":
            made["staleness"] = batch.staleness
        return batch.sequences(made), metrics

    def units(self, batch: UpdateBatch) -> float:
        """Count the units of a batch."""
        kept = columns.kept_samples(batch, self._policy.advantage)
        shares = columns.sample_shares(batch, self._policy.sample_weights, kept)
        counted = columns.counted_tokens(batch, kept, shares)
        return counted_units(self._policy.aggregation.type, batch.response_lengths, counted, shares)

    def adapt(self, metrics: dict[str, float], samples: int) -> None:
        """After a step: remember its rewards; the coefficient moves towards the target divergence, if there is one."""
        self._history = self._seen
        kl = self._policy.kl
        if kl.target is not None and "kl/mean" in metrics:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient,
                metrics["kl/mean"],
                target=kl.target,
                horizon_samples=kl.horizon_samples,
                samples=samples,
            )

    def state(self) -> dict[str, Any]:
        """Return what updates have changed here, for a checkpoint."""
        return {"kl_coefficient": self.kl_coefficient, "reward_history": asdict(self._history)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier session."""
        self.kl_coefficient = state["kl_coefficient"]
        self._history = RewardHistory(**state["reward_history"])

    @property
    def _samples_divergence(self) -> bool:
        """Return whether a divergence is estimated on the sampled tokens; ranks compute whole ones."""
        return self._policy.kl.placement != "none" and self._policy.kl.estimator != "full"

    @property
    def _needs_rollout_logprobs(self) -> bool:
        return (
            self._policy.loss.has_ratio
            or self._policy.correction.looks_at_proximal
            or self._policy.kl.placement != "none"
        )

    def _columns(
        self, batch: UpdateBatch, seed: int, parts: Sequence[NDArray[np.bool_]]
    ) -> tuple[Columns, dict[str, float]]:
        policy = self._policy
        metrics: dict[str, float] = {}
        distance = penalties = None
        if policy.kl.placement != "none":
            metrics["kl/coefficient"] = self.kl_coefficient
        if self._samples_divergence:
            distance = columns.reference_divergence(batch, policy.kl.estimator)
            metrics["kl/mean"] = float(distance.sum() / batch.trained.sum())
            if policy.kl.placement == "reward":
                penalties = self.kl_coefficient * distance
        kept = columns.kept_samples(batch, policy.advantage)
        shares = columns.sample_shares(batch, policy.sample_weights, kept)
        counted = columns.counted_tokens(batch, kept, shares)
        advantages = self._advantages(batch, kept, seed, penalties, metrics)
        weights = columns.weights_of(batch, policy.aggregation, self._limit, counted, parts, shares)
        weights = weights * policy.correction.staleness_decay**batch.staleness
        metrics["advantages/std"] = float(advantages[counted].std()) if counted.any() else 0.0
        metrics["tokens/counted_share"] = float(counted.sum() / batch.trained.sum())

        made: Columns = {
            "advantages": advantages,
            "weights": weights,
            "sequences": batch.pieces.of_tokens,
        }
        if batch.logprobs is not None:
            made |= {"rollout_logprobs": batch.logprobs, "fresh": batch.fresh}
        if policy.kl.placement == "loss":
            made["kl_weights"] = self.kl_coefficient * weights
            if self._samples_divergence:
                assert batch.reference_logprobs is not None, "sent, or scored by the ranks"
                made["reference_logprobs"] = batch.reference_logprobs
        if policy.teacher is not None:
            made |= columns.teacher_columns(batch, policy.teacher, weights)
            metrics["teacher/mass"] = columns.teacher_mass(batch)
        selected = columns.selected_tokens(
            batch, policy.loss.type, policy.loss.arguments, advantages, counted, seed
        )
        if selected is not None:
            made["selected"] = selected
        by_segment = policy.loss.arguments.get("over") == "segment"
        if by_segment or policy.correction.importance == "segment":
            made["segments"] = columns.segments_of(batch)
        return made, metrics

    def _advantages(
        self,
        batch: UpdateBatch,
        kept: NDArray[np.bool_],
        seed: int,
        penalties: Any,
        metrics: dict[str, float],
    ) -> NDArray[Any]:
        policy = self._policy
        if batch.advantages is not None:
            _check_advantages_stand_alone(batch, policy)
            return batch.advantages
        outcomes, self._seen = columns.outcomes_of(
            batch, policy, self._limit, kept, seed, penalties, self._history
        )
        if policy.advantage.type == "gigpo":
            metrics["turns/compared_share"] = compared_share(outcomes.only(kept))
        return columns.advantages_of(outcomes, kept, policy.advantage, self._function)


def _check_advantages_stand_alone(batch: UpdateBatch, policy: PolicyConfig) -> None:
    """Refuse keys that act before advantages are made, where a client sends finished advantages."""
    advantage = policy.advantage
    asked = {
        "kl.placement reward": policy.kl.placement == "reward",
        "advantage.whiten": advantage.whiten,
        "advantage.clip": advantage.clip is not None,
        "advantage.reward_clip": advantage.reward_clip is not None,
        "advantage.overlong": advantage.overlong is not None,
        "advantage.reward_normalization": advantage.reward_normalization is not None,
        "shuffle_rewards": policy.shuffle_rewards,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(
                f"algorithm.{key} cannot be applied to advantages that are sent",
                where=sample_place(batch.sample_ids[0]),
                why="the field `advantages` is set, and they are used as they are",
                next_step=f"apply it before they are sent and leave algorithm.{key} out, or send rewards alone",
            )
