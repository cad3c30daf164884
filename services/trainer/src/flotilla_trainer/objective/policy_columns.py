"""The numbers that the ranks need for every trained token of an update, computed from the whole of it.

Invariants: denominators, means and selections are those of the update, whatever the cuts; all columns cover all
response tokens here and are cut down to the trained ones in one place, by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import (
    ADVANTAGES,
    AdvantageFunction,
    Outcomes,
    RewardHistory,
    covariances,
    difficulty_weights,
    divergence,
    drawn_between,
    highest,
    kept_groups,
    length_weights,
    mean_importance,
    normalised_rewards,
    overlong_penalties,
    reward_weights,
    shuffled_rewards,
    token_advantages,
    token_weights,
)
from flotilla_algorithms.outcomes import NO_HISTORY, segment_sums
from flotilla_core.config import PolicyConfig
from flotilla_core.config.advantages import AdvantageConfig, RewardNormalizationConfig
from flotilla_core.config.algorithm import AggregationConfig, CorrectionConfig
from flotilla_core.config.losses import SampleWeightsConfig
from flotilla_core.config.training import TeacherConfig
from flotilla_core.errors import NotFinite, UserCodeError
from flotilla_trainer.batch.tokens import sample_place
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.wire.user_functions import guarded, is_user_function, load_user_function

Floats = NDArray[np.float64]


def advantage_function(name: str) -> AdvantageFunction:
    """A function of ours, or one of the user's."""
    return load_user_function(name) if is_user_function(name) else ADVANTAGES[name]


def outcomes_of(
    batch: UpdateBatch,
    policy: PolicyConfig,
    limit: int,
    kept: NDArray[np.bool_],
    seed: int,
    penalties: Floats | None,
    history: RewardHistory = NO_HISTORY,
) -> tuple[Outcomes, RewardHistory]:
    """Return the rewards as the advantage sees them, and the history with this update.

    Rewards are bounded, punished, in a control shuffled, and then normalised by the samples that are kept.
    """
    check_rewards(batch)
    rewards, greedy, advantage = batch.rewards, batch.greedy_reward, policy.advantage
    if advantage.reward_clip is not None:
        rewards = np.clip(rewards, -advantage.reward_clip, advantage.reward_clip)
        greedy = None if greedy is None else np.clip(greedy, -advantage.reward_clip, advantage.reward_clip)
    if advantage.overlong is not None:
        rewards = rewards + overlong_penalties(
            own_lengths(batch),
            limit=limit,
            buffer_tokens=advantage.overlong.buffer_tokens,
            penalty=advantage.overlong.penalty,
        )
    earned = batch.rewards
    if policy.shuffle_rewards:
        # One seed, one permutation: a reward and what was made of it stay together.
        rewards, earned = shuffled_rewards(rewards, seed), shuffled_rewards(earned, seed)
    seen = None
    if advantage.reward_normalization is not None:
        seen = history.after(rewards[kept])
        rewards = _normalised(rewards, batch, kept, advantage.reward_normalization, seen)
    lead = None
    if batch.teacher_logprobs is not None and batch.logprobs is not None:
        lead = batch.teacher_logprobs.astype(np.float64) - batch.logprobs
    outcomes = Outcomes.of(
        rewards,
        batch.group_sizes,
        batch.response_lengths,
        batch.trained,
        penalties,
        earned=earned,
        values=batch.values,
        value_after=batch.value_after,
        truncated=batch.truncated,
        score_squares=batch.score_squares,
        teacher_lead=lead,
        history=history,
        terms=batch.reward_terms,
        greedy_rewards=greedy,
        begins=batch.pieces.begins,
        turn_rewards=batch.turn_rewards if _turns_tell(policy) else None,
        turn_states=batch.turn_states,
    )
    # Two things may look at a history, and never both: normalisation at rewards, a baseline at what is left of them.
    return outcomes, history.after(outcomes.totals[kept]) if seen is None else seen


def _turns_tell(policy: PolicyConfig) -> bool:
    """Return whether the rewards of turns are parts of the rewards that the advantage sees.

    They are not where the control experiment gives a sample another's reward, nor where the sum has another scale.
    """
    advantage = policy.advantage
    whole = advantage.reward_clip is None and advantage.reward_normalization is None
    return whole and not policy.shuffle_rewards


def check_rewards(batch: UpdateBatch) -> None:
    """Refuse a reward that is not finite, naming its sample."""
    wrong = np.flatnonzero(~np.isfinite(batch.rewards))
    if wrong.size:
        raise NotFinite(
            f"a reward is {batch.rewards[wrong[0]]}",
            where=sample_place(batch.sample_ids[wrong[0]]),
            next_step="let the reward function report an error instead of a number",
        )


def _normalised(
    rewards: Floats,
    batch: UpdateBatch,
    kept: NDArray[np.bool_],
    normalization: RewardNormalizationConfig,
    seen: RewardHistory,
) -> Floats:
    return normalised_rewards(
        rewards,
        batch.group_sizes,
        kept,
        mean=normalization.mean,
        std=normalization.std,
        clip=normalization.clip,
        scale=normalization.scale,
        history=seen,
    )


def own_lengths(batch: UpdateBatch) -> NDArray[np.int64]:
    """Return how many tokens of each response the policy wrote itself; context is not its doing."""
    return segment_sums(batch.trained.astype(np.float64), batch.response_lengths).astype(np.int64)


def advantages_of(
    outcomes: Outcomes,
    kept: NDArray[np.bool_],
    advantage: AdvantageConfig,
    function: AdvantageFunction,
) -> Floats:
    """Return one a token, made of the samples that are kept; zeros for the others."""
    name, arguments = advantage.type, advantage.arguments
    options: dict[str, Any] = {"kept": kept, "whiten": advantage.whiten, "clip": advantage.clip}
    if not is_user_function(name):
        return token_advantages(function, outcomes, arguments, **options)

    def called(given: Outcomes, **parameters: Any) -> Any:
        return guarded(name, lambda: function(given, **parameters))

    try:
        return token_advantages(called, outcomes, arguments, **options)
    except (ValueError, TypeError) as error:
        raise UserCodeError("the advantages cannot be used", where=name, why=str(error)) from error


def kept_samples(batch: UpdateBatch, advantage: AdvantageConfig) -> NDArray[np.bool_]:
    """Return which samples are left in: not cut off where those are dropped, and of groups within the limits.

    Whole groups stay or go by the rewards of their samples that are left, as these came.
    """
    kept = ~batch.truncated if advantage.drop_truncated else np.ones(batch.rewards.size, np.bool_)
    above, below = advantage.keep_mean_above, advantage.keep_mean_below
    if not advantage.drop_uniform_groups and above is None and below is None:
        return kept
    check_rewards(batch)
    left = Outcomes.of(batch.rewards, batch.group_sizes).only(kept)
    groups = kept_groups(left, drop_uniform=advantage.drop_uniform_groups, mean_above=above, mean_below=below)
    kept[kept] = np.repeat(groups, left.group_sizes)
    return kept


def sample_shares(batch: UpdateBatch, weights: SampleWeightsConfig, kept: NDArray[np.bool_]) -> Floats | None:
    """Return how much each sample counts, by those that are kept; None where all count alike."""
    if not weights.look_at_rewards and weights.by_length is None:
        return None
    check_rewards(batch)
    left = Outcomes.of(batch.rewards, batch.group_sizes).only(kept)
    factors = np.ones(left.rewards.size)
    if weights.by_reward != "none":
        kind, power = weights.by_reward, weights.power
        factors = factors * reward_weights(left.rewards, left.group_sizes, kind=kind, power=power)
    if weights.by_difficulty is not None:
        easiest, hardest = weights.by_difficulty.easiest, weights.by_difficulty.hardest
        factors = factors * difficulty_weights(
            left.rewards, left.group_sizes, easiest=easiest, hardest=hardest
        )
    if weights.by_length is not None:
        shortest, longest = weights.by_length.shortest, weights.by_length.longest
        factors = factors * length_weights(own_lengths(batch)[kept], shortest=shortest, longest=longest)
    shares = np.zeros(batch.rewards.size)
    shares[kept] = factors
    return shares


def counted_tokens(batch: UpdateBatch, kept: NDArray[np.bool_], shares: Floats | None) -> NDArray[np.bool_]:
    """Return the trained tokens of the samples that are kept and weigh something."""
    counts = kept if shares is None else kept & (shares > 0)
    tokens: NDArray[np.bool_] = batch.trained & np.repeat(counts, batch.response_lengths)
    return tokens


def weights_of(
    batch: UpdateBatch,
    aggregation: AggregationConfig,
    limit: int,
    counted: NDArray[np.bool_],
    parts: Sequence[NDArray[np.bool_]],
    shares: Floats | None,
) -> Floats:
    """Return how much each token counts, with the denominator of the mini-batch that contains it."""
    constant = aggregation.constant_tokens or limit
    return part_weights(aggregation.type, batch, counted, parts, constant, shares)


def part_weights(
    aggregation: str,
    batch: UpdateBatch,
    counted: NDArray[np.bool_],
    parts: Sequence[NDArray[np.bool_]],
    constant: int = 0,
    shares: Floats | None = None,
) -> Floats:
    """The weights of the counted tokens, each part with a denominator of its own; without parts the whole is one."""
    weights = np.zeros(counted.size)
    for part in parts or [np.ones_like(counted)]:
        weights += token_weights(aggregation, batch.response_lengths, counted & part, constant, shares)
    return weights


def importance_mean(
    batch: UpdateBatch, correction: CorrectionConfig, policy: NDArray[np.float32], counted: NDArray[np.bool_]
) -> float:
    """Return the mean weight of the update, over what has one: a token, a stretch or a sequence."""
    assert batch.logprobs is not None, "checked before columns are made"
    by_token = correction.importance in ("token", "icepop")
    units = segments_of(batch) if correction.importance == "segment" else batch.pieces.of_tokens
    bounded = correction.importance.startswith("icepop")
    return mean_importance(
        policy.astype(np.float64) - batch.logprobs,
        np.arange(counted.size) if by_token else units,
        counted,
        cap=correction.importance_cap,
        floor=correction.importance_floor if bounded else None,
    )


def segments_of(batch: UpdateBatch) -> NDArray[np.int64]:
    """Number the stretches of trained tokens with no context in between; a sequence never shares one with another."""
    before = np.concatenate(([False], batch.trained[:-1]))
    numbers: NDArray[np.int64] = np.cumsum(batch.trained & (batch.pieces.begins | ~before))
    return numbers


def reference_divergence(batch: UpdateBatch, estimator: str) -> Floats:
    """Return the divergence of the sampling policy from the reference, one a token, zero for untrained ones."""
    assert batch.logprobs is not None and batch.reference_logprobs is not None, (
        "checked before columns are made"
    )
    sampled, reference = batch.logprobs.astype(np.float64), batch.reference_logprobs.astype(np.float64)
    values = divergence(estimator, sampled, reference)
    return np.where(batch.trained, values, 0.0)


def teacher_columns(batch: UpdateBatch, teacher: TeacherConfig, weights: Floats) -> dict[str, NDArray[Any]]:
    """Return the columns of a divergence from the teacher, which is weighted like one from the reference."""
    assert batch.teacher_top_token_ids is not None and batch.teacher_top_logprobs is not None, (
        "checked before columns are made"
    )
    return {
        "teacher_weights": teacher.coefficient * weights,
        "teacher_top_ids": batch.teacher_top_token_ids,
        "teacher_top_logprobs": batch.teacher_top_logprobs,
    }


def teacher_mass(batch: UpdateBatch) -> float:
    """Return the teacher's probability of the tokens that were sent, as a mean over the trained positions."""
    assert batch.teacher_top_logprobs is not None, "checked before columns are made"
    return float(np.exp(batch.teacher_top_logprobs[batch.trained]).sum(-1).mean(dtype=np.float64))


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
