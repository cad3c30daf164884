"""The samples of one update, checked and laid out flat.

Invariants: whatever is wrong is refused here, naming the sample, before a rank sees anything; arrays follow the order
of the wire, group by group; token ids are those that were sampled, never re-made from text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.common.v1 import tensor_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_trainer.frames import Array
from flotilla_trainer.packing import Sequences


@dataclass(frozen=True)
class ModelLimits:
    """What fits the model."""

    vocabulary: int
    max_sequence_tokens: int
    """0 where the model has no limit."""


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
    reference_logprobs: NDArray[np.float32] | None
    teacher_logprobs: NDArray[np.float32] | None
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
        _check_unique(ids)
        prompts = [_tokens(group.prompt_token_ids, f"prompt of group {group.group_id!r}") for group in groups]
        sizes = np.array([len(group.samples) for group in groups])
        responses = [_tokens(sample.token_ids, sample_place(sample.sample_id)) for sample in samples]
        lengths = np.array([len(response) for response in responses])
        prompt_of = np.repeat(np.arange(len(groups)), sizes)
        tokens, prompt_lengths = _joined([prompts[index] for index in prompt_of], responses, ids, limits)
        staleness, fresh = _ages(samples, lengths, version)
        batch = cls(
            sample_ids=ids,
            group_sizes=sizes,
            prompt_lengths=prompt_lengths,
            response_lengths=lengths,
            tokens=tokens,
            rewards=np.array([sample.reward for sample in samples]),
            reward_terms=_reward_terms(samples),
            greedy_reward=_greedy_reward(groups),
            trained=_mask(samples, lengths),
            logprobs=_optional("logprobs", samples, lengths),
            advantages=_optional("advantages", samples, lengths),
            values=_optional("values", samples, lengths),
            reference_logprobs=_optional("reference_logprobs", samples, lengths),
            teacher_logprobs=_optional("teacher_logprobs", samples, lengths),
            staleness=staleness,
            fresh=fresh,
        )
        if not batch.trained.any():
            raise InvalidRequest("no token of the update is trained", why="every mask is false")
        return batch

    def sequences(self, columns: dict[str, NDArray[Any]] | None = None) -> Sequences:
        """What the ranks need; `columns` cover all response tokens and are cut down to those that are trained."""
        return Sequences(
            tokens=self.tokens,
            lengths=self.prompt_lengths + self.response_lengths,
            scored=response_places(self.prompt_lengths, self.response_lengths)[self.trained],
            columns={
                name: column[self.trained].astype(np.float32) for name, column in (columns or {}).items()
            },
        )

    def all_responses(self) -> Sequences:
        """Every response token to be scored, trained or not."""
        return Sequences(
            tokens=self.tokens,
            lengths=self.prompt_lengths + self.response_lengths,
            scored=response_places(self.prompt_lengths, self.response_lengths),
        )


def read_scored(
    sequences: Iterable[pb.ScoredSequence], limits: ModelLimits
) -> tuple[list[str], Sequences, Any]:
    """Ids, sequences and response lengths of a scoring request."""
    items = list(sequences)
    if not items:
        raise InvalidRequest("there is nothing to score", where="sequences")
    ids = [item.sequence_id for item in items]
    _check_unique(ids)
    prompts = [
        _tokens(item.prompt_token_ids, f"prompt of {sample_place(item.sequence_id)}") for item in items
    ]
    responses = [_tokens(item.token_ids, sample_place(item.sequence_id)) for item in items]
    lengths = np.array([len(response) for response in responses])
    tokens, prompt_lengths = _joined(prompts, responses, ids, limits)
    scored = response_places(prompt_lengths, lengths)
    return ids, Sequences(tokens=tokens, lengths=prompt_lengths + lengths, scored=scored), lengths


def response_places(
    prompt_lengths: NDArray[np.int64], response_lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where the response tokens lie within all tokens."""
    ends = np.cumsum(prompt_lengths + response_lengths)
    before = np.cumsum(response_lengths) - response_lengths
    offset = ends - response_lengths - before
    return np.arange(int(response_lengths.sum())) + np.repeat(offset, response_lengths)


def _joined(
    prompts: list[Array], responses: list[Array], ids: list[str], limits: ModelLimits
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Prompt, response, prompt, response, ... as one array, within the limits of the model."""
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    tokens = np.concatenate(parts)
    prompt_lengths = np.array([len(prompt) for prompt in prompts])
    lengths = prompt_lengths + np.array([len(response) for response in responses])
    too_long = np.flatnonzero(lengths > limits.max_sequence_tokens) if limits.max_sequence_tokens else ()
    if len(too_long):
        raise InvalidRequest(
            f"a sequence of {lengths[too_long[0]]} tokens does not fit the model",
            where=sample_place(ids[too_long[0]]),
            why=f"the model takes {limits.max_sequence_tokens}",
            next_step="lower rollout.sampling.max_response_tokens or drop long prompts",
        )
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limits.vocabulary))
    if wrong.size:
        owner = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise InvalidRequest(
            f"token id {tokens[wrong[0]]} is not in the vocabulary",
            where=sample_place(ids[owner]),
            why=f"the model knows ids 0 to {limits.vocabulary - 1}",
            next_step="use the tokenizer of the model that the trainer holds",
        )
    return tokens.astype(np.int32), prompt_lengths


def _tokens(tensor: tensor_pb2.Tensor, where: str) -> Array:
    if not tensor.data:
        raise InvalidRequest("there are no tokens", where=where)
    tokens = from_tensor(tensor)
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise InvalidRequest(
            f"token ids are {tokens.dtype}{list(tokens.shape)}, not a list of integers", where=where
        )
    return tokens


def _optional(
    name: str, samples: list[pb.TrainSample], lengths: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """A per-token number that all samples carry, or none does."""
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
    return np.concatenate(arrays).astype(np.float32)


def _reward_terms(samples: list[pb.TrainSample]) -> NDArray[np.float64] | None:
    """The terms of every reward, as many for each sample."""
    count = len(samples[0].reward_terms)
    for sample in samples:
        if len(sample.reward_terms) != count or not np.isfinite(sample.reward_terms).all():
            raise InvalidRequest(
                f"`reward_terms` holds {list(sample.reward_terms)}",
                where=sample_place(sample.sample_id),
                why=f"the first sample of the update has {count} terms, and all of them are finite",
            )
    return np.array([sample.reward_terms for sample in samples]).T if count else None


def _greedy_reward(groups: Sequence[pb.TrainGroup]) -> NDArray[np.float64] | None:
    """One finite number a group, which all of its samples carry, or none in the whole update."""
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


def _mask(samples: list[pb.TrainSample], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    masks = []
    for sample, length in zip(samples, lengths, strict=True):
        mask = from_tensor(sample.mask) if sample.mask.data else np.ones(length, np.bool_)
        if mask.shape != (length,) or mask.dtype != np.bool_:
            raise InvalidRequest(
                f"`mask` holds {mask.size} flags for {length} tokens", where=sample_place(sample.sample_id)
            )
        masks.append(mask)
    return np.concatenate(masks)


def _ages(
    samples: list[pb.TrainSample], lengths: NDArray[np.int64], version: Version | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Staleness, and what is known to be fresh; tokens that no version claims count as written by the newest."""
    behind = np.zeros(int(lengths.sum()), np.int64)
    fresh = np.zeros(len(behind), np.bool_)
    if version is None:
        return behind, fresh
    starts = np.cumsum(lengths) - lengths
    for sample, start, length in zip(samples, starts.tolist(), lengths.tolist(), strict=True):
        for span in sample.version_spans:
            wrote = Version.from_proto(span.version)
            if not span.start <= span.end <= length:
                raise InvalidRequest(
                    f"tokens {span.start} to {span.end} of version {wrote} do not lie within {length} tokens",
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
            fresh[tokens] = wrote == version
    return behind, fresh


def _check_unique(ids: list[str]) -> None:
    seen: set[str] = set()
    for identifier in ids:
        if not identifier or identifier in seen:
            raise InvalidRequest("an id is empty or stands twice", where=sample_place(identifier))
        seen.add(identifier)


def sample_place(identifier: str) -> str:
    """Where an error about a sample points."""
    return f"sample {identifier!r}"
