"""The numbers that the ranks need for every trained token of an update, computed from the whole of it.

Invariants: denominators, means and selections are those of the update, whatever the cuts; all columns cover all
response tokens here and are cut down to the trained ones in one place, by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_algorithms import (
    ADVANTAGES,
    AdvantageFunction,
    Outcomes,
    RewardHistory,
    covariances,
    divergence,
    drawn_between,
    highest,
    kept_groups,
    overlong_penalties,
    shuffled_rewards,
    token_advantages,
    token_weights,
)
from flotilla_algorithms.outcomes import NO_HISTORY, segment_sums
from flotilla_core.errors import NotFinite, UserCodeError
from flotilla_trainer.objective.user_functions import guarded, is_user_function, load_user_function
from flotilla_trainer.rank.objective_settings import FULL_DIVERGENCE
from flotilla_trainer.sequence_tokens import sample_place
from flotilla_trainer.update_batch import UpdateBatch

Floats = NDArray[np.float64]

AGGREGATIONS = {
    pb.AGGREGATION_TYPE_TOKEN_MEAN: "token_mean",
    pb.AGGREGATION_TYPE_SEQUENCE_MEAN_OF_TOKEN_SUM: "sequence_mean_of_token_sum",
    pb.AGGREGATION_TYPE_SEQUENCE_MEAN_OF_TOKEN_MEAN: "sequence_mean_of_token_mean",
    pb.AGGREGATION_TYPE_CONSTANT: "constant",
    pb.AGGREGATION_TYPE_TOKEN_SUM: "token_sum",
}
ESTIMATORS = {
    pb.KL_ESTIMATOR_K1: "k1",
    pb.KL_ESTIMATOR_K2: "k2",
    pb.KL_ESTIMATOR_K3: "k3",
    pb.KL_ESTIMATOR_ABS: "abs",
    pb.KL_ESTIMATOR_FULL: FULL_DIVERGENCE,
}


def advantage_function(name: str) -> AdvantageFunction:
    """A function of ours, or one of the user's."""
    return load_user_function(name) if is_user_function(name) else ADVANTAGES[name]


def outcomes_of(
    batch: UpdateBatch,
    policy: pb.PolicyObjective,
    seed: int,
    penalties: Floats | None,
    history: RewardHistory = NO_HISTORY,
) -> Outcomes:
    """The rewards as the advantage sees them: punished, bounded and, in a control, shuffled."""
    wrong = np.flatnonzero(~np.isfinite(batch.rewards))
    if wrong.size:
        raise NotFinite(
            f"a reward is {batch.rewards[wrong[0]]}",
            where=sample_place(batch.sample_ids[wrong[0]]),
            next_step="let the reward function report an error instead of a number",
        )
    rewards, greedy, advantage = batch.rewards, batch.greedy_reward, policy.advantage
    if advantage.HasField("overlong"):
        rewards = rewards + overlong_penalties(
            own_lengths(batch),
            limit=policy.max_response_tokens,
            buffer_tokens=advantage.overlong.buffer_tokens,
            penalty=advantage.overlong.penalty,
        )
    if advantage.HasField("reward_clip"):
        rewards = np.clip(rewards, -advantage.reward_clip, advantage.reward_clip)
        greedy = None if greedy is None else np.clip(greedy, -advantage.reward_clip, advantage.reward_clip)
    earned = batch.rewards
    if policy.shuffle_rewards:
        # One seed, one permutation: a reward and what was made of it stay together.
        rewards, earned = shuffled_rewards(rewards, seed), shuffled_rewards(earned, seed)
    lead = None
    if batch.teacher_logprobs is not None and batch.logprobs is not None:
        lead = batch.teacher_logprobs.astype(np.float64) - batch.logprobs
    return Outcomes.of(
        rewards,
        batch.group_sizes,
        batch.response_lengths,
        batch.trained,
        penalties,
        earned=earned,
        values=batch.values,
        value_after=batch.value_after,
        truncated=batch.truncated,
        teacher_lead=lead,
        history=history,
        terms=batch.reward_terms,
        greedy_rewards=greedy,
    )


def own_lengths(batch: UpdateBatch) -> NDArray[np.int64]:
    """Return how many tokens of each response the policy wrote itself; context is not its doing."""
    return segment_sums(batch.trained.astype(np.float64), batch.response_lengths).astype(np.int64)


def advantages_of(
    outcomes: Outcomes,
    kept: NDArray[np.bool_],
    advantage: pb.Advantage,
    function: AdvantageFunction,
    arguments: dict[str, Any],
) -> Floats:
    """Return one a token, made of the samples that are kept; zeros for the others."""
    name = advantage.function.name
    options: dict[str, Any] = {
        "kept": kept,
        "whiten": advantage.whiten,
        "clip": advantage.clip if advantage.HasField("clip") else None,
    }
    if not is_user_function(name):
        return token_advantages(function, outcomes, arguments, **options)

    def called(given: Outcomes, **parameters: Any) -> Any:
        return guarded(name, lambda: function(given, **parameters))

    try:
        return token_advantages(called, outcomes, arguments, **options)
    except (ValueError, TypeError) as error:
        raise UserCodeError("the advantages cannot be used", where=name, why=str(error)) from error


def kept_samples(batch: UpdateBatch, advantage: pb.Advantage) -> NDArray[np.bool_]:
    """Return which samples the difficulty limits leave in: whole groups, by the rewards as they came."""
    above = advantage.keep_mean_above if advantage.HasField("keep_mean_above") else None
    below = advantage.keep_mean_below if advantage.HasField("keep_mean_below") else None
    if not advantage.drop_uniform_groups and above is None and below is None:
        return np.ones(batch.rewards.size, np.bool_)
    outcomes = Outcomes.of(batch.rewards, batch.group_sizes)
    kept = kept_groups(
        outcomes, drop_uniform=advantage.drop_uniform_groups, mean_above=above, mean_below=below
    )
    samples: NDArray[np.bool_] = np.repeat(kept, batch.group_sizes)
    return samples


def counted_tokens(batch: UpdateBatch, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the trained tokens of the samples that are kept."""
    tokens: NDArray[np.bool_] = batch.trained & np.repeat(kept, batch.response_lengths)
    return tokens


def weights_of(
    batch: UpdateBatch,
    policy: pb.PolicyObjective,
    counted: NDArray[np.bool_],
    parts: Sequence[NDArray[np.bool_]],
) -> Floats:
    """How much each token counts, with the denominator of the mini-batch that it lies in."""
    constant = policy.aggregation.constant_tokens or policy.max_response_tokens
    kind = AGGREGATIONS[policy.aggregation.type]
    return part_weights(kind, batch, counted, parts, constant)


def part_weights(
    aggregation: str,
    batch: UpdateBatch,
    counted: NDArray[np.bool_],
    parts: Sequence[NDArray[np.bool_]],
    constant: int = 0,
) -> Floats:
    """The weights of the counted tokens, each part with a denominator of its own; without parts the whole is one."""
    weights = np.zeros(counted.size)
    for part in parts or [np.ones_like(counted)]:
        weights += token_weights(aggregation, batch.response_lengths, counted & part, constant)
    return weights


def segments_of(batch: UpdateBatch) -> NDArray[np.int64]:
    """Number the stretches of trained tokens with no context in between; a response never shares one with another."""
    first = np.zeros(batch.trained.size, np.bool_)
    first[np.cumsum(batch.response_lengths) - batch.response_lengths] = True
    before = np.concatenate(([False], batch.trained[:-1]))
    numbers: NDArray[np.int64] = np.cumsum(batch.trained & (first | ~before))
    return numbers


def reference_divergence(batch: UpdateBatch, estimator: int) -> Floats:
    """Of the policy that sampled from the reference, one a token, zero where nothing is trained."""
    assert batch.logprobs is not None and batch.reference_logprobs is not None, (
        "checked before columns are made"
    )
    sampled, reference = batch.logprobs.astype(np.float64), batch.reference_logprobs.astype(np.float64)
    values = divergence(ESTIMATORS[estimator], sampled, reference)
    return np.where(batch.trained, values, 0.0)


def selected_tokens(
    batch: UpdateBatch,
    loss: str,
    arguments: dict[str, Any],
    advantages: Floats,
    counted: NDArray[np.bool_],
    seed: int,
) -> NDArray[np.bool_] | None:
    """The tokens that a loss treats apart by their covariance, under the log-probabilities of the rollout."""
    if loss not in ("clip_cov", "kl_cov"):
        return None
    assert batch.logprobs is not None, "checked before columns are made"
    covariance = covariances(batch.logprobs.astype(np.float64), advantages, counted)
    if loss == "kl_cov":
        return highest(covariance, arguments["share"])
    limits = arguments["covariance_low"], arguments["covariance_high"]
    return drawn_between(covariance, *limits, arguments["share"], seed)
