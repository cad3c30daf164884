"""Outcomes: all that an advantage may know of an update, and the history of the rewards before it.

Invariants: samples follow each other group by group, tokens sample by sample; every number is finite, and for a
reward that is not the caller learns which one it was; sizes and lengths cut their arrays exactly; a token of context
pays no penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class NonFiniteRewardError(ValueError):
    """A reward is NaN or infinite; `index` is its place among the rewards of the update."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"reward {index} is {value}")
        self.index = index
        self.value = value


def finite_rewards(rewards: ArrayLike) -> NDArray[np.float64]:
    """One reward a sample, as float64."""
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"rewards must be one number a sample, got an array of shape {array.shape}")
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise NonFiniteRewardError(int(wrong[0]), float(array[wrong[0]]))
    return array


@dataclass(frozen=True)
class RewardHistory:
    """Mean and deviation of all rewards that a run has learned from so far.

    Three numbers that stand for any number of rewards, and grow exactly.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def after(self, rewards: ArrayLike) -> Self:
        """Return the same outcomes with these rewards as well, in any number of parts."""
        values = finite_rewards(rewards)
        if not values.size:
            return self
        count = self.count + values.size
        # From the first one on, so that equal rewards have a deviation of exactly zero.
        relative = values - values[0]
        distance = float(values[0] + relative.mean()) - self.mean
        return type(self)(
            count,
            self.mean + distance * (values.size / count),
            self.squares
            + float(np.square(relative - relative.mean()).sum())
            + distance**2 * self.count * values.size / count,
        )

    @property
    def deviation(self) -> float:
        """The sample one, divided by n - 1; 0 for fewer than two."""
        return sqrt(self.squares / max(self.count - 1, 1))


NO_HISTORY = RewardHistory()
NO_STATE = 0
"""The key of a turn whose state nobody named."""


@dataclass(frozen=True)
class Outcomes:
    """The rewards of an update and the shape of its groups and responses."""

    rewards: Floats
    """One a sample, for its whole response."""
    earned: Floats
    """One a sample: its reward before anything was taken from it or made of it; what judges outcomes looks here."""
    group_sizes: Ints
    response_lengths: Ints
    trained: NDArray[np.bool_]
    """One a token: whether it is the policy's own; the others are context."""
    penalties: Floats
    """One a token, subtracted from the reward where the token stands; zeros unless a reference is kept near."""
    values: Floats | None = None
    """One a token: what a critic expects before it is drawn."""
    value_after: Floats | None = None
    """One a sample: what a critic expects after its last token."""
    truncated: NDArray[np.bool_] | None = None
    """One a sample: whether it was cut off at a length limit; None where no sample was."""
    score_squares: Floats | None = None
    """One a token: squared length of the gradient of its log-probability by the logits, 1 - 2 p + sum of all p^2."""
    teacher_lead: Floats | None = None
    """One a token: log-probability under the teacher less that under the policy that drew it."""
    history: RewardHistory = NO_HISTORY
    """The rewards of the updates before."""
    terms: Floats | None = None
    """One row a term of the reward, one column a sample: what each gave by itself."""
    greedy_rewards: Floats | None = None
    """One a group: what the greedy response to its prompt earned."""
    begins: NDArray[np.bool_] | None = None
    """One a token: whether a sequence of its sample begins with it; None where each sample is one sequence."""
    turn_rewards: Floats | None = None
    """One a token: the part of the reward that comes with the turn that ends there; None where no turn has one."""
    turn_states: Ints | None = None
    """One a token: the key of the state in which the turn that ends there was asked, `NO_STATE` elsewhere; None where
    no turn has one."""

    @classmethod
    def of(
        cls,
        rewards: ArrayLike,
        group_sizes: ArrayLike,
        response_lengths: ArrayLike | None = None,
        trained: ArrayLike | None = None,
        penalties: ArrayLike | None = None,
        *,
        earned: ArrayLike | None = None,
        values: ArrayLike | None = None,
        value_after: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
        score_squares: ArrayLike | None = None,
        teacher_lead: ArrayLike | None = None,
        history: RewardHistory = NO_HISTORY,
        terms: Floats | None = None,
        greedy_rewards: Floats | None = None,
        begins: ArrayLike | None = None,
        turn_rewards: ArrayLike | None = None,
        turn_states: ArrayLike | None = None,
    ) -> Self:
        """Return checked arrays; by default responses of one trained token without penalty, rewards as they came."""
        totals = finite_rewards(rewards)
        outcomes = totals if earned is None else finite_rewards(earned)
        if outcomes.shape != totals.shape:
            raise ValueError(f"{outcomes.size} rewards as they came do not belong to {totals.size} rewards")
        sizes = checked_sizes(group_sizes, totals.size)
        lengths = np.ones(totals.size, np.int64)
        if response_lengths is not None:
            lengths = np.asarray(response_lengths, dtype=np.int64)
        if lengths.shape != totals.shape or (lengths < 1).any():
            raise ValueError(f"{lengths.size} response lengths do not belong to {totals.size} rewards")
        tokens = int(lengths.sum())
        cut = None if truncated is None else np.asarray(truncated, dtype=np.bool_)
        if cut is not None and cut.shape != totals.shape:
            raise ValueError(f"{cut.size} flags of cut-off responses do not belong to {totals.size} rewards")
        mask = np.ones(tokens, np.bool_) if trained is None else np.asarray(trained, dtype=np.bool_)
        cost = np.zeros(tokens) if penalties is None else np.asarray(penalties, dtype=np.float64)
        if mask.shape != (tokens,) or cost.shape != (tokens,):
            raise ValueError(f"{mask.size} flags and {cost.size} penalties do not belong to {tokens} tokens")
        first = None if begins is None else np.asarray(begins, dtype=np.bool_)
        if first is not None and first.shape != (tokens,):
            raise ValueError(f"{first.size} flags of beginnings do not belong to {tokens} tokens")
        states = None if turn_states is None else np.asarray(turn_states, dtype=np.int64)
        if states is not None and states.shape != (tokens,):
            raise ValueError(f"{states.size} keys of states do not belong to {tokens} tokens")
        return cls(
            totals,
            outcomes,
            sizes,
            lengths,
            mask,
            np.where(mask, cost, 0.0),
            values=_one_each(values, tokens, "tokens"),
            value_after=_one_each(value_after, totals.size, "samples"),
            truncated=cut,
            score_squares=_one_each(score_squares, tokens, "tokens"),
            teacher_lead=_one_each(teacher_lead, tokens, "tokens"),
            history=history,
            terms=terms,
            greedy_rewards=greedy_rewards,
            begins=first,
            turn_rewards=_one_each(turn_rewards, tokens, "tokens"),
            turn_states=states,
        )

    def only(self, kept: NDArray[np.bool_]) -> Self:
        """Return what these samples came to, as if the others had never been drawn; `kept` has one flag a sample."""
        tokens = np.repeat(kept, self.response_lengths)
        sizes = self.group_sums(kept.astype(np.float64)).astype(np.int64)
        groups = sizes > 0
        return replace(
            self,
            rewards=self.rewards[kept],
            earned=self.earned[kept],
            group_sizes=sizes[groups],
            response_lengths=self.response_lengths[kept],
            trained=self.trained[tokens],
            penalties=self.penalties[tokens],
            values=None if self.values is None else self.values[tokens],
            value_after=None if self.value_after is None else self.value_after[kept],
            truncated=None if self.truncated is None else self.truncated[kept],
            score_squares=None if self.score_squares is None else self.score_squares[tokens],
            teacher_lead=None if self.teacher_lead is None else self.teacher_lead[tokens],
            terms=None if self.terms is None else self.terms[:, kept],
            greedy_rewards=None if self.greedy_rewards is None else self.greedy_rewards[groups],
            begins=None if self.begins is None else self.begins[tokens],
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards[tokens],
            turn_states=None if self.turn_states is None else self.turn_states[tokens],
        )

    def gains(self) -> Floats:
        """Return what each trained token earns: the rewards of turns, the rest of the reward at the last token.

        The rest is the reward of the whole, and what was made of the rewards after they came. Penalties are taken off.
        """
        own, lengths = self.trained, self.trained_lengths
        gains, rest = -self.penalties[own], self.rewards
        if self.turn_rewards is not None:
            at_once = np.where(own, self.turn_rewards, 0.0)
            gains, rest = gains + at_once[own], rest - self.sample_sums(at_once)
        gains[(np.cumsum(lengths) - 1)[lengths > 0]] += rest[lengths > 0]
        return gains

    @property
    def totals(self) -> Floats:
        """One a sample: its reward less all penalties of its tokens."""
        return self.rewards - self.sample_sums(self.penalties)

    @property
    def trained_lengths(self) -> Ints:
        """Trained tokens of each sample."""
        return self.sample_sums(self.trained.astype(np.float64)).astype(np.int64)

    def sample_sums(self, tokens: Floats) -> Floats:
        """Sums over the tokens of each sample."""
        return segment_sums(tokens, self.response_lengths)

    def group_sums(self, samples: Floats) -> Floats:
        """Sums over the samples of each group."""
        return segment_sums(samples, self.group_sizes)

    def to_tokens(self, samples: Floats) -> Floats:
        """Return a value a sample as one a token."""
        return np.repeat(samples, self.response_lengths)


def _one_each(column: ArrayLike | None, count: int, of_what: str) -> Floats | None:
    """Return finite numbers, one each, where there are any."""
    if column is None:
        return None
    numbers = np.asarray(column, dtype=np.float64)
    if numbers.shape != (count,) or not np.isfinite(numbers).all():
        raise ValueError(f"{numbers.size} numbers do not belong to {count} {of_what}, or are not finite")
    return numbers


def segment_sums(values: Floats, lengths: Ints) -> Floats:
    """Sums over consecutive parts, none of them empty."""
    if not values.size:
        return np.zeros(lengths.size)
    sums: Floats = np.add.reduceat(values, np.cumsum(lengths) - lengths)
    return sums


def checked_sizes(group_sizes: ArrayLike, samples: int) -> Ints:
    """Group sizes that cut this many samples."""
    sizes = np.asarray(group_sizes, dtype=np.int64)
    if sizes.ndim != 1 or (sizes < 1).any() or sizes.sum() != samples:
        raise ValueError(f"group sizes {sizes.tolist()} do not cut {samples} rewards into groups")
    return sizes
