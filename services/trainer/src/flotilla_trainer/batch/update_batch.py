"""The samples of one update as flat, checked arrays, and the plan of the optimizer steps that are taken on them.

Invariants: invalid samples are refused here, by name, before a rank sees any; arrays follow the order of the wire,
group by group; a column is there for all samples or for none, and per-token columns cover the responses one after the
other; token ids are those that were sampled, never re-made from text. Every group is in one mini-batch, and their sizes
differ by one group at most; all passes are equal; a mini-batch without a counted token is no step; an update with fewer
groups than steps makes one step for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import OptimizerConfig
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import (
    NO_TOKENS,
    ModelLimits,
    Pieces,
    check_ids,
    joined_tokens,
    pieces_of,
    response_places,
    sample_place,
    teacher_tokens,
    token_ids,
)


@dataclass(frozen=True)
class UpdateBatch:
    """All samples of an update; per-token arrays cover the responses one after the other."""

    sample_ids: list[str]
    group_sizes: NDArray[np.int64]
    pieces: Pieces
    """The sequences of the samples: several of an episode whose history was rewritten."""
    response_lengths: NDArray[np.int64]
    """The number of tokens of each sample, of all its sequences together."""
    tokens: NDArray[np.int32]
    rewards: NDArray[np.float64]
    reward_terms: NDArray[np.float64] | None
    """One row for each term of the reward, one column for each sample; None where they were not sent."""
    greedy_reward: NDArray[np.float64] | None
    """The reward of the greedy response to the prompt of each group; None where they were not sent."""
    trained: NDArray[np.bool_]
    turn_rewards: NDArray[np.float64] | None
    """One number for each token: what came at once with the turn that ends with it; None where no turn has one."""
    turn_states: NDArray[np.int64] | None
    """One number for each token: the key of the state in which the turn that ends with it was asked, else 0; None where
    no turn has one."""
    logprobs: NDArray[np.float32] | None
    advantages: NDArray[np.float32] | None
    """The advantages that the caller computed itself; None where it did not."""
    values: NDArray[np.float32] | None
    """The critic's value before each token."""
    value_after: NDArray[np.float64] | None
    """The critic's value after the last token of each sample; None where they were not sent."""
    truncated: NDArray[np.bool_]
    """One flag for each sample; a True sample was cut off at a length limit."""
    reference_logprobs: NDArray[np.float32] | None
    teacher_logprobs: NDArray[np.float32] | None
    teacher_top_token_ids: NDArray[np.int32] | None
    """The tokens that the teacher finds likeliest, [response tokens, k]."""
    teacher_top_logprobs: NDArray[np.float32] | None
    """The log-probabilities of these tokens, [response tokens, k]."""
    score_squares: NDArray[np.float64] | None
    """One number for each response token, where the ranks were asked for it: 1 - 2 p + the sum of all p^2, under the
    current policy."""
    staleness: NDArray[np.int64]
    """The number of versions between the one that wrote a token and the one that it trains."""
    fresh: NDArray[np.bool_]
    """The tokens that the version that they train is known to have written."""

    @classmethod
    def read(
        cls, groups: Sequence[pb.TrainGroup], limits: ModelLimits, version: Version | None
    ) -> UpdateBatch:
        """Read the batch that trains `version`; None says that another model wrote it, whose versions do not count."""
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
        sizes = np.array([len(group.samples) for group in groups])
        pieces = Pieces.of([of_sample for group in groups for of_sample in _pieces_of_group(group)])
        lengths = pieces.sample_lengths
        tokens = joined_tokens(pieces, ids, limits)
        staleness, fresh = ages(samples, lengths, version)
        top_ids, top_logprobs = teacher_tokens(samples, lengths, limits.vocabulary)
        at_once, states = turn_columns(samples, lengths)
        batch = cls(
            sample_ids=ids,
            group_sizes=sizes,
            pieces=pieces,
            response_lengths=lengths,
            tokens=tokens,
            rewards=np.array([sample.reward for sample in samples]),
            reward_terms=reward_terms(samples),
            greedy_reward=greedy_rewards(groups),
            trained=trained_mask(samples, lengths),
            turn_rewards=at_once,
            turn_states=states,
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
        """Return the sequences for the ranks, with `columns` over all response tokens cut down to the trained ones.

        Numbers become float32; token ids, which are int32 from the wire on, keep their type.
        """
        return Sequences(
            tokens=self.tokens,
            lengths=self.pieces.lengths,
            scored=response_places(self.pieces.prompt_lengths, self.pieces.response_lengths)[self.trained],
            columns={
                name: column[self.trained].astype(np.int32 if column.dtype == np.int32 else np.float32)
                for name, column in (columns or {}).items()
            },
        )

    def all_responses(self) -> Sequences:
        """Return the sequences with every response token scored, trained or not."""
        return Sequences(
            tokens=self.tokens,
            lengths=self.pieces.lengths,
            scored=response_places(self.pieces.prompt_lengths, self.pieces.response_lengths),
        )


def _pieces_of_group(group: pb.TrainGroup) -> list[list[tuple[NDArray[Any], NDArray[Any]]]]:
    """Return the sequences of each sample; a group of episodes alone needs no prompt of its own."""
    own = all(sample.branches for sample in group.samples)
    prompt = NO_TOKENS if own else token_ids(group.prompt_token_ids, f"prompt of group {group.group_id!r}")
    return [
        pieces_of(prompt, sample.token_ids, sample.branches, sample_place(sample.sample_id))
        for sample in group.samples
    ]


def numbers(
    name: str, samples: list[pb.TrainSample], lengths: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """Read a per-token number that all samples carry, or none does."""
    given = [bool(getattr(sample, name).data) for sample in samples]
    if not any(given):
        return None
    arrays = []
    for sample, length, present in zip(samples, lengths, given, strict=True):
        values = from_tensor(getattr(sample, name)) if present else np.zeros(0, np.float32)
        if values.shape != (length,) or values.dtype.kind != "f":
            raise InvalidRequest(
                f"`{name}` holds {values.size} numbers for {length} tokens",
                where=sample_place(sample.sample_id),
            )
        if not np.isfinite(values).all():
            raise InvalidRequest(
                f"`{name}` holds a number that is not finite", where=sample_place(sample.sample_id)
            )
        arrays.append(values)
    column: NDArray[np.float32] = np.concatenate(arrays).astype(np.float32)
    return column


def reward_terms(samples: list[pb.TrainSample]) -> NDArray[np.float64] | None:
    """Read the terms of every reward, equally many for each sample."""
    count = len(samples[0].reward_terms)
    for sample in samples:
        if len(sample.reward_terms) != count or not np.isfinite(sample.reward_terms).all():
            raise InvalidRequest(
                f"`reward_terms` holds {list(sample.reward_terms)}",
                where=sample_place(sample.sample_id),
                why=f"the first sample of the update has {count} terms, and all of them are finite",
            )
    return np.array([sample.reward_terms for sample in samples]).T if count else None


def greedy_rewards(groups: Sequence[pb.TrainGroup]) -> NDArray[np.float64] | None:
    """Read one finite number for each group, which all of its samples carry; None where no sample carries one."""
    samples = [sample for group in groups for sample in group.samples]
    if not any(sample.HasField("greedy_reward") for sample in samples):
        return None
    for group in groups:
        for sample in group.samples:
            has, first = sample.HasField("greedy_reward"), group.samples[0].greedy_reward
            if not has or sample.greedy_reward != first or not np.isfinite(first):
                raise InvalidRequest(
                    f"`greedy_reward` is {sample.greedy_reward if has else 'empty'}",
                    where=sample_place(sample.sample_id),
                    why="samples of one prompt have one greedy response, whose reward is a finite number",
                )
    return np.array([group.samples[0].greedy_reward for group in groups])


def values_after(samples: list[pb.TrainSample]) -> NDArray[np.float64] | None:
    """Read one finite number for each sample; None where no sample carries one."""
    if not any(sample.HasField("value_after") for sample in samples):
        return None
    for sample in samples:
        if not sample.HasField("value_after") or not np.isfinite(sample.value_after):
            raise InvalidRequest(
                f"`value_after` is {sample.value_after if sample.HasField('value_after') else 'empty'}",
                where=sample_place(sample.sample_id),
                why="all samples of an update carry a finite number, or none does",
            )
    return np.array([sample.value_after for sample in samples])


def trained_mask(samples: list[pb.TrainSample], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Read the mask of trained tokens; a sample without a mask trains all of its tokens."""
    masks = []
    for sample, length in zip(samples, lengths, strict=True):
        mask = from_tensor(sample.mask) if sample.mask.data else np.ones(length, np.bool_)
        if mask.shape != (length,) or mask.dtype != np.bool_:
            raise InvalidRequest(
                f"`mask` holds {mask.size} flags for {length} tokens", where=sample_place(sample.sample_id)
            )
        masks.append(mask)
    return np.concatenate(masks)


def turn_columns(
    samples: list[pb.TrainSample], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.float64] | None, NDArray[np.int64] | None]:
    """Read the rewards of turns, and the keys of their states, each at the last token of its turn."""
    if not any(sample.turns for sample in samples):
        return None, None
    rewards, states = np.zeros(int(lengths.sum())), np.zeros(int(lengths.sum()), np.int64)
    starts = np.cumsum(lengths) - lengths
    for sample, start, length in zip(samples, starts.tolist(), lengths.tolist(), strict=True):
        if length and sample.turns and not any(turn.end for turn in sample.turns):
            raise InvalidRequest(
                "none of its turns says where it ends",
                where=sample_place(sample.sample_id),
                why=f"it has {length} tokens",
            )
        for turn in sample.turns:
            _check_turn(sample, turn, length)
            if not turn.end:
                continue  # It has no token, so its reward comes with the rest.
            place = start + turn.end - 1
            # An older coordinator tells of a turn without tokens that it ends where the one before it does.
            rewards[place] += turn.reward
            states[place] = states[place] or turn.state
    return rewards, states if states.any() else None


def _check_turn(sample: pb.TrainSample, turn: pb.RewardedTurn, length: int) -> None:
    where = sample_place(sample.sample_id)
    if turn.end > length:
        raise InvalidRequest(
            f"one of its turns ends at {turn.end}", where=where, why=f"it has {length} tokens"
        )
    if not np.isfinite(turn.reward):
        raise InvalidRequest(f"the reward of a turn is {turn.reward}", where=where)


def ages(
    samples: list[pb.TrainSample], lengths: NDArray[np.int64], version: Version | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the staleness of each token and whether it is known to be fresh.

    A token outside every version span counts as written by the newest version. A token after those of an older version
    is not fresh, because the KV cache that it was decoded on may be of the older weights.
    """
    behind = np.zeros(int(lengths.sum()), np.int64)
    fresh = np.zeros(len(behind), np.bool_)
    if version is None:
        return behind, fresh
    starts = np.cumsum(lengths) - lengths
    for sample, start, length in zip(samples, starts.tolist(), lengths.tolist(), strict=True):
        of_one_version = len({Version.from_proto(span.version) for span in sample.version_spans}) == 1
        for span in sample.version_spans:
            wrote = Version.from_proto(span.version)
            if not span.start <= span.end <= length:
                raise InvalidRequest(
                    f"tokens {span.start} to {span.end} of version {wrote} are not within {length} tokens",
                    where=sample_place(sample.sample_id),
                )
            if wrote > version:
                raise InvalidRequest(
                    f"tokens are said to be written by version {wrote}, which does not exist yet",
                    where=sample_place(sample.sample_id),
                    why=f"the update trains version {version}",
                    next_step="send the version spans that the generator reported",
                )
            tokens = slice(start + span.start, start + span.end)
            behind[tokens] = max(0, version.step - wrote.step)
            fresh[tokens] = of_one_version and wrote == version
    return behind, fresh


@dataclass(frozen=True)
class StepPlan:
    """The number of mini-batches of an update, and of passes over them, that a session asks for."""

    mini_batches: int = 1
    epochs: int = 1

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> StepPlan:
        """Read the plan from the section."""
        return cls(optimizer.steps_per_update, optimizer.epochs_per_update)

    @property
    def several(self) -> bool:
        """Return whether an update may take more than one step."""
        return self.mini_batches * self.epochs > 1

    def parts(self, batch: UpdateBatch) -> list[NDArray[np.bool_]]:
        """Return a mask over all response tokens for each mini-batch."""
        samples = self._of_groups(len(batch.group_sizes)).repeat(batch.group_sizes)
        tokens = samples.repeat(batch.response_lengths)
        return [tokens == number for number in range(int(tokens[-1]) + 1)]

    def steps(self, sequences: Sequences, batch: UpdateBatch) -> list[Sequences]:
        """Return the sequences of each step, in order; mini-batches without a counted token are left out."""
        samples = self._of_groups(len(batch.group_sizes)).repeat(batch.group_sizes)
        edges = np.searchsorted(samples.repeat(batch.pieces.counts), np.arange(int(samples[-1]) + 2))
        cut = [sequences.between(first, last) for first, last in pairwise(edges.tolist())]
        steps = self.epochs * [part for part in cut if part.columns["weights"].any()]
        return [_at(step, number, len(steps)) for number, step in enumerate(steps)]

    def _of_groups(self, groups: int) -> NDArray[np.int64]:
        """Return the mini-batch of each group."""
        return np.arange(groups) * min(self.mini_batches, groups) // groups


def _at(step: Sequences, number: int, steps: int) -> Sequences:
    """Return the step with the columns that depend on its place among the steps of the update."""
    columns = dict(step.columns)
    if number == 0:
        # The first forward pass already runs the policy before the update. Log-probabilities of a separate pass would
        # differ by rounding, and the sign of that difference would become the gradient of a distance.
        columns.pop("proximal_logprobs", None)
    if "staleness" not in columns:
        return replace(step, columns=columns)
    columns["proximal_share"] = proximal_share(columns.pop("staleness"), number / steps)
    return replace(step, columns=columns)


def proximal_share(staleness: NDArray[np.float32], gone: float) -> NDArray[np.float32]:
    """Return how far the policy before the update is on the way from the sampling to the current policy: s / (s + d).

    s is the staleness of a token in updates, d the share of this update that is `gone`; the result is 1 at its start.
    """
    if not gone:
        return np.ones_like(staleness)
    return staleness / (staleness + np.float32(gone))
