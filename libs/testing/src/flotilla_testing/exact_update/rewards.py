"""The processing of rewards before the advantage, and the choice of the samples that are left out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flotilla_core.config import PolicyConfig
from flotilla_core.config.advantages import AdvantageConfig, RewardNormalizationConfig
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


@dataclass(frozen=True, eq=False)
class Judgement:
    """The input of an advantage."""

    rollouts: Rollouts
    rewards: Floats
    """One a sample: bounded, punished and shuffled as the configuration asks."""
    earned: Floats
    """One a sample: the reward as it came, shuffled with the other."""
    greedy_rewards: Floats
    """One a group, bounded like the others."""
    penalties: Floats
    """One a token: what the distance from the reference takes from the reward."""
    kept: Bools
    """Samples that stay in the update."""
    earlier: Floats
    """Values that a running mean has seen before: totals of the updates before, or their rewards where it
    normalises."""

    seen: Floats
    """The same values of this update."""
    turns_tell: bool
    """Whether the parts of the reward come with the turns: not where rewards are shuffled, clipped or normalised."""
    score_squares: Floats
    """One a token: the squared length of the gradient of its log-probability by the logits, before the update."""

    @cached_property
    def totals(self) -> Floats:
        """One a sample: the reward less all penalties."""
        return self.rewards - self.rollouts.sums_of_samples(self.penalties)

    @property
    def counted(self) -> Bools:
        """Tokens that are trained and stay in the update."""
        return self.rollouts.trained & self.kept[self.rollouts.sample_of_token]

    def gains(self, sample: int) -> Floats:
        """Return what each trained token of a sample earns: its penalty, its turn's reward, the rest at the end."""
        own = self.rollouts.own_tokens[sample]
        at_once = self.rollouts.turn_rewards[own] if self.turns_tell else np.zeros(len(own))
        made: Floats = at_once - self.penalties[own]
        if len(own):
            made[-1] += self.rewards[sample] - at_once.sum()
        return made

    def gains_of_turns(self, sample: int) -> Floats:
        """Return what each turn of a sample earns."""
        of_token = dict(zip(self.rollouts.own_tokens[sample].tolist(), self.gains(sample), strict=True))
        turns = self.rollouts.turns(sample)
        return np.array([sum(of_token[token] for token in turn.tolist()) for turn in turns])

    def of_kept(self) -> Judgement:
        """Return the same, as if the samples that are left out had never been drawn."""
        return Judgement(
            rollouts=self.rollouts.of_samples(self.kept),
            rewards=self.rewards[self.kept],
            earned=self.earned[self.kept],
            greedy_rewards=self.greedy_rewards[np.unique(self.rollouts.group_of_sample[self.kept])],
            penalties=self.penalties[self.kept[self.rollouts.sample_of_token]],
            kept=self.kept[self.kept],
            earlier=self.earlier,
            seen=self.seen,
            turns_tell=self.turns_tell,
            score_squares=self.score_squares[self.kept[self.rollouts.sample_of_token]],
        )


def kept_samples(rollouts: Rollouts, advantage: AdvantageConfig) -> Bools:
    """Return whether each sample is kept: not truncated, and of a group within the limits, by the raw rewards."""
    kept = ~rollouts.truncated if advantage.drop_truncated else np.ones(rollouts.samples, np.bool_)
    for members in rollouts.members:
        rewards = rollouts.rewards[members[kept[members]]]
        if not len(rewards):
            continue
        if advantage.drop_uniform_groups and len(set(rewards.tolist())) == 1:
            kept[members] = False
        if advantage.keep_mean_above is not None and not rewards.mean() > advantage.keep_mean_above:
            kept[members] = False
        if advantage.keep_mean_below is not None and not rewards.mean() < advantage.keep_mean_below:
            kept[members] = False
    return kept


def normalised(
    section: RewardNormalizationConfig, rollouts: Rollouts, rewards: Floats, kept: Bools, earlier: Floats
) -> Floats:
    """Return scale times (R - mean) / deviation over the kept samples; equal rewards are not divided."""
    made = np.zeros(len(rewards))
    for members in rollouts.members:
        seen = {
            "group": rewards[members[kept[members]]],
            "batch": rewards[kept],
            "running": np.concatenate([earlier, rewards[kept]]),
        }
        mean = seen[section.mean].mean() if section.mean != "none" and len(seen[section.mean]) else 0.0
        compared = seen.get(section.std, np.zeros(0))
        deviation = compared.std(ddof=1) if len(compared) > 1 and np.ptp(compared) else 0.0
        made[members] = (rewards[members] - mean) / (deviation + 1e-6 if deviation else 1.0)
    if section.clip is not None:
        made = np.clip(made, -section.clip, section.clip)
    return section.scale * made


def judged(
    algorithm: PolicyConfig,
    rollouts: Rollouts,
    penalties: Floats,
    earlier: Floats,
    score_squares: Floats,
    *,
    max_response_tokens: int,
    seed: int,
) -> Judgement:
    """The rewards of an update as its advantage sees them."""
    advantage: AdvantageConfig = algorithm.advantage
    rewards, greedy = rollouts.rewards.copy(), rollouts.greedy_rewards
    if advantage.reward_clip is not None:
        limit = advantage.reward_clip
        rewards, greedy = np.clip(rewards, -limit, limit), np.clip(greedy, -limit, limit)
    if advantage.overlong is not None:
        buffer = advantage.overlong.buffer_tokens
        for sample, own in enumerate(rollouts.own_tokens):
            over = min(max(len(own) - (max_response_tokens - buffer), 0), buffer)
            rewards[sample] -= advantage.overlong.penalty * over / buffer
    earned = rollouts.rewards
    if algorithm.shuffle_rewards:
        rewards = np.random.default_rng(seed).permutation(rewards)
        earned = np.random.default_rng(seed).permutation(earned)
    kept = kept_samples(rollouts, advantage)
    if advantage.reward_normalization is None:
        seen = (rewards - rollouts.sums_of_samples(penalties))[kept]
    else:
        seen = rewards[kept]
        rewards = normalised(advantage.reward_normalization, rollouts, rewards, kept, earlier)
    return Judgement(
        rollouts,
        rewards,
        earned,
        greedy,
        penalties,
        kept,
        earlier,
        seen,
        turns_tell=not algorithm.shuffle_rewards
        and advantage.reward_clip is None
        and advantage.reward_normalization is None,
        score_squares=score_squares,
    )
