"""The samples of one update, checked and laid out flat.

Invariants: whatever is wrong is refused here, naming the sample, before a rank sees anything; arrays follow the order
of the wire, group by group; token ids are those that were sampled, never re-made from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.version import Version
from flotilla_trainer.packing import Sequences
from flotilla_trainer.sample_columns import (
    ages,
    greedy_rewards,
    numbers,
    reward_terms,
    trained_mask,
    values_after,
)
from flotilla_trainer.sequence_tokens import (
    ModelLimits,
    check_ids,
    joined_tokens,
    response_places,
    sample_place,
    token_ids,
)
from flotilla_trainer.teacher_tokens import teacher_tokens


@dataclass(frozen=True)
class UpdateBatch:
    """All samples of an update; per-token arrays cover the responses one after the other."""

    sample_ids: list[str]
    group_sizes: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    rewards: NDArray[np.float64]
    reward_terms: NDArray[np.float64] | None
    """One row a term of the reward, one column a sample, where they were sent."""
    greedy_reward: NDArray[np.float64] | None
    """One a group: what the greedy response to its prompt earned, where it was sent."""
    trained: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    advantages: NDArray[np.float32] | None
    """Where the caller computed them itself."""
    values: NDArray[np.float32] | None
    """What the critic expected before each token."""
    value_after: NDArray[np.float64] | None
    """One a sample: what the critic expected after its last token, where it was sent."""
    truncated: NDArray[np.bool_]
    """One a sample: whether it was cut off at a length limit."""
    reference_logprobs: NDArray[np.float32] | None
    teacher_logprobs: NDArray[np.float32] | None
    teacher_top_token_ids: NDArray[np.int32] | None
    """[response tokens, k]: those that the teacher finds likeliest."""
    teacher_top_logprobs: NDArray[np.float32] | None
    """[response tokens, k]."""
    score_squares: NDArray[np.float64] | None
    """One a response token, where the ranks were asked: 1 - 2 p + the sum of all p^2 under the policy as it is."""
    staleness: NDArray[np.int64]
    """Versions that lie between the one that wrote a token and the one that it trains."""
    fresh: NDArray[np.bool_]
    """Tokens that are known to be written by the version that they train."""

    @classmethod
    def read(
        cls, groups: Sequence[pb.TrainGroup], limits: ModelLimits, version: Version | None
    ) -> UpdateBatch:
        """The batch on the wire, to train `version`; None where another model wrote it, whose versions say nothing."""
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            raise InvalidRequest(
                "the update has no samples", next_step="send at least one group with a sample"
            )
        for group in groups:
            if not group.samples:
                raise InvalidRequest("a group has no samples", where=f"group {group.group_id!r}")
        ids = [sample.sample_id for sample in samples]
        check_ids(ids)
        prompts = [
            token_ids(group.prompt_token_ids, f"prompt of group {group.group_id!r}") for group in groups
        ]
        sizes = np.array([len(group.samples) for group in groups])
        responses = [token_ids(sample.token_ids, sample_place(sample.sample_id)) for sample in samples]
        lengths = np.array([len(response) for response in responses])
        prompt_of = np.repeat(np.arange(len(groups)), sizes)
        tokens, prompt_lengths = joined_tokens(
            [prompts[index] for index in prompt_of], responses, ids, limits
        )
        staleness, fresh = ages(samples, lengths, version)
        top_ids, top_logprobs = teacher_tokens(samples, lengths, limits.vocabulary)
        batch = cls(
            sample_ids=ids,
            group_sizes=sizes,
            prompt_lengths=prompt_lengths,
            response_lengths=lengths,
            tokens=tokens,
            rewards=np.array([sample.reward for sample in samples]),
            reward_terms=reward_terms(samples),
            greedy_reward=greedy_rewards(groups),
            trained=trained_mask(samples, lengths),
            logprobs=numbers("logprobs", samples, lengths),
            advantages=numbers("advantages", samples, lengths),
            values=numbers("values", samples, lengths),
            value_after=values_after(samples),
            truncated=np.array([sample.truncated for sample in samples]),
            reference_logprobs=numbers("reference_logprobs", samples, lengths),
            teacher_logprobs=numbers("teacher_logprobs", samples, lengths),
            teacher_top_token_ids=top_ids,
            teacher_top_logprobs=top_logprobs,
            score_squares=None,
            staleness=staleness,
            fresh=fresh,
        )
        if not batch.trained.any():
            raise InvalidRequest("no token of the update is trained", why="every mask is false")
        return batch

    def sequences(self, columns: dict[str, NDArray[Any]] | None = None) -> Sequences:
        """What the ranks need; `columns` cover all response tokens and are cut down to those that are trained.

        Numbers become float32; ids of tokens, which are int32 from the wire on, stay what they are.
        """
        return Sequences(
            tokens=self.tokens,
            lengths=self.prompt_lengths + self.response_lengths,
            scored=response_places(self.prompt_lengths, self.response_lengths)[self.trained],
            columns={
                name: column[self.trained].astype(np.int32 if column.dtype == np.int32 else np.float32)
                for name, column in (columns or {}).items()
            },
        )

    def all_responses(self) -> Sequences:
        """Every response token to be scored, trained or not."""
        return Sequences(
            tokens=self.tokens,
            lengths=self.prompt_lengths + self.response_lengths,
            scored=response_places(self.prompt_lengths, self.response_lengths),
        )
