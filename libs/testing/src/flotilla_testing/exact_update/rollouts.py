"""The inputs of an update besides its configuration: sampled groups, and the policies that score them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Groups of samples, laid out flat: samples group by group, tokens sample by sample."""

    group_of_sample: Ints
    """The number of each sample's group."""
    sample_of_token: Ints
    """The number of each token's sample."""
    tokens: Ints
    """The ids of the response tokens."""
    trained: Bools
    """Tokens that the policy wrote; the others are context."""
    branches: Bools
    """Tokens that begin a further sequence of their sample, after a prompt of its own."""
    staleness: Ints
    """Versions between the one that wrote a token and the one that it trains."""
    rollout_logprobs: Floats
    """The log-probability of each token, as the generator said."""
    teacher_logprobs: Floats
    """The log-probability of each token, as the teacher without a name said."""
    named_teachers: dict[str, Floats]
    """The same of each teacher with a name."""
    teacher_of_group: npt.NDArray[np.str_]
    """The name of the teacher that each prompt is for."""
    teacher_ids: Ints
    """Token ids, [tokens, vocabulary], those first that the teacher finds likeliest."""
    teacher_id_logprobs: Floats
    """The log-probabilities of these, [tokens, vocabulary]."""
    values: Floats
    """The value that the critic expected before each token."""
    values_after: Floats
    """The value that the critic expected after the last token, one a sample."""
    truncated: Bools
    """Samples that were cut off at the length limit."""
    rewards: Floats
    """One a sample."""
    turn_rewards: Floats
    """One a token: the part of the reward that came with the turn that ends there."""
    turn_states: Ints
    """One a token: the number of the state in which the turn that ends there was asked; 0 where it has no name."""
    terms: Floats
    """[samples, terms]: what each term of the reward gave."""
    greedy_rewards: Floats
    """One a group: what the greedy response to the prompt earned."""

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.group_of_sample[-1]) + 1

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.rewards)

    @property
    def group_of_token(self) -> Ints:
        """The number of each token's group."""
        return self.group_of_sample[self.sample_of_token]

    @cached_property
    def members(self) -> list[Ints]:
        """The samples of each group."""
        return [np.flatnonzero(self.group_of_sample == group) for group in range(self.groups)]

    @cached_property
    def lengths(self) -> Ints:
        """All response tokens of each sample."""
        return np.bincount(self.sample_of_token, minlength=self.samples)

    @cached_property
    def own_tokens(self) -> list[Ints]:
        """The trained tokens of each sample."""
        return [
            np.flatnonzero((self.sample_of_token == sample) & self.trained) for sample in range(self.samples)
        ]

    @cached_property
    def sequence_of_token(self) -> Ints:
        """The number of each token's sequence: a sample is one, and each of its branches one more."""
        starts = self.branches.copy()
        starts[1:] |= self.sample_of_token[1:] != self.sample_of_token[:-1]
        return np.cumsum(starts)

    @cached_property
    def segments(self) -> Ints:
        """A number for each token, equal for those of one sequence with no context in between."""
        changes = np.ones(len(self.tokens), np.bool_)
        changes[1:] = (self.trained[1:] != self.trained[:-1]) | (
            self.sequence_of_token[1:] != self.sequence_of_token[:-1]
        )
        return np.cumsum(changes)

    def turns(self, sample: int) -> list[Ints]:
        """Return the trained tokens of each turn of a sample."""
        own = self.own_tokens[sample]
        return [own[self.segments[own] == turn] for turn in np.unique(self.segments[own])]

    def sums_of_samples(self, of_tokens: Floats) -> Floats:
        """Return the sum over the tokens of each sample."""
        sums = np.bincount(self.sample_of_token, weights=of_tokens, minlength=self.samples)
        return np.asarray(sums, np.float64)

    def of_samples(self, chosen: Bools) -> Rollouts:
        """Some of the samples by themselves, whole groups of them."""
        tokens = chosen[self.sample_of_token]
        groups = np.unique(self.group_of_sample[chosen])
        return Rollouts(
            group_of_sample=np.searchsorted(groups, self.group_of_sample[chosen]),
            sample_of_token=np.searchsorted(np.flatnonzero(chosen), self.sample_of_token[tokens]),
            tokens=self.tokens[tokens],
            trained=self.trained[tokens],
            branches=self.branches[tokens],
            staleness=self.staleness[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            teacher_logprobs=self.teacher_logprobs[tokens],
            named_teachers={name: said[tokens] for name, said in self.named_teachers.items()},
            teacher_of_group=self.teacher_of_group[groups],
            teacher_ids=self.teacher_ids[tokens],
            teacher_id_logprobs=self.teacher_id_logprobs[tokens],
            values=self.values[tokens],
            values_after=self.values_after[chosen],
            truncated=self.truncated[chosen],
            rewards=self.rewards[chosen],
            turn_rewards=self.turn_rewards[tokens],
            turn_states=self.turn_states[tokens],
            terms=self.terms[chosen],
            greedy_rewards=self.greedy_rewards[groups],
        )


@dataclass(frozen=True, eq=False)
class Policies:
    """The models that score the tokens of an update: the policy and the critic at each step, and the reference."""

    steps: list[torch.Tensor]
    """[tokens, vocabulary] logits of the policy at the beginning of each optimizer step."""
    reference: torch.Tensor
    """[tokens, vocabulary] logits of the policy that the run started from."""
    critic: list[torch.Tensor]
    """[tokens] values at the beginning of each optimizer step of the critic."""

    def of_tokens(self, chosen: Bools) -> Policies:
        """Return the same of some of the tokens."""
        mask = torch.from_numpy(chosen)
        return Policies(
            steps=[logits[mask] for logits in self.steps],
            reference=self.reference[mask],
            critic=[values[mask] for values in self.critic],
        )


def logprobs_of(logits: torch.Tensor, tokens: npt.NDArray[Any]) -> torch.Tensor:
    """Return the log-probability of each token under its row of logits."""
    scores = torch.log_softmax(logits, dim=-1)
    return scores[torch.arange(len(tokens)), torch.from_numpy(tokens)]
