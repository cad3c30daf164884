"""Read tokens from the wire into checked arrays: prompts, responses, and the likeliest tokens of a teacher.

Invariants: token ids are those that were sampled, never re-made from text; input that does not fit the model is
refused, naming the sample and the field; all samples carry a teacher's tokens or none does, equally many at every
position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.common.v1 import tensor_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.wire.frames import Array

IDS, LOGPROBS = "teacher_top_token_ids", "teacher_top_logprobs"
ROUNDING = 1e-3
"""The most by which the probabilities of a position may add up to more than one."""


@dataclass(frozen=True)
class ModelLimits:
    """The limits that a model sets on sequences."""

    vocabulary: int
    max_sequence_tokens: int
    """The longest sequence; 0 where the model has no limit."""


NOTHING_FOLLOWS = 0
"""A placeholder after a sequence, for the score after its last token; it is no token and is fed to no model."""
NO_TOKENS = np.zeros(0, np.int32)


def read_scored(
    sequences: Iterable[pb.ScoredSequence], limits: ModelLimits, *, after_last: bool = False
) -> tuple[list[str], Sequences, Any]:
    """Return ids, sequences and the number of scored places of each.

    `after_last` adds a place after the response, which may be empty then.
    """
    items = list(sequences)
    if not items:
        raise InvalidRequest("there is nothing to score", where="sequences")
    ids = [item.sequence_id for item in items]
    check_ids(ids)
    pieces = Pieces.of(
        [
            pieces_of(
                NO_TOKENS if item.branches else token_ids(item.prompt_token_ids, f"prompt of {place}"),
                item.token_ids,
                item.branches,
                place,
                may_be_empty=after_last,
            )
            for item in items
            for place in [sample_place(item.sequence_id)]
        ]
    )
    tokens = joined_tokens(pieces, ids, limits)
    lengths = pieces.sample_lengths
    if after_last:
        last = np.cumsum(pieces.counts) - 1
        tokens = np.insert(tokens, np.cumsum(pieces.lengths)[last], NOTHING_FOLLOWS)
        pieces.response_lengths[last] += 1
        lengths = lengths + 1
    scored = response_places(pieces.prompt_lengths, pieces.response_lengths)
    return ids, Sequences(tokens=tokens, lengths=pieces.lengths, scored=scored), lengths


@dataclass(frozen=True)
class Pieces:
    """The sequences of samples, in their order: one of each, or of an episode one of each branch."""

    prompts: list[Array]
    responses: list[Array]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    """The number of sequences of each sample."""

    @classmethod
    def of(cls, samples: list[list[tuple[Array, Array]]]) -> Pieces:
        """Return the sequences of samples, each given as pairs of a prompt and what follows it."""
        prompts, responses = zip(*(piece for sample in samples for piece in sample), strict=True)
        return cls(
            list(prompts),
            list(responses),
            np.array([len(prompt) for prompt in prompts]),
            np.array([len(response) for response in responses]),
            np.array([len(sample) for sample in samples]),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sequence."""
        return self.prompt_lengths + self.response_lengths

    @property
    def of_tokens(self) -> NDArray[np.int64]:
        """The number of the sequence of each response token."""
        return np.repeat(np.arange(self.response_lengths.size), self.response_lengths)

    @property
    def begins(self) -> NDArray[np.bool_]:
        """One flag for each response token: whether its sequence begins with it."""
        first = np.zeros(int(self.response_lengths.sum()), np.bool_)
        first[np.cumsum(self.response_lengths) - self.response_lengths] = True
        return first

    @property
    def sample_lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, without prompts."""
        return np.add.reduceat(self.response_lengths, np.cumsum(self.counts) - self.counts)


def pieces_of(
    prompt: Array,
    response: tensor_pb2.Tensor,
    branches: Sequence[pb.Branch],
    place: str,
    *,
    may_be_empty: bool = False,
) -> list[tuple[Array, Array]]:
    """Return the sequences of one sample: each a prompt and what follows it. Branches have their own."""
    tokens = NO_TOKENS if may_be_empty and not response.data else token_ids(response, place)
    if not branches:
        return [(prompt, tokens)]
    edges = [*(branch.start for branch in branches), len(tokens)]
    if edges[0] != 0 or any(begin >= end for begin, end in pairwise(edges)):
        raise InvalidRequest(
            f"its branches start at {edges[:-1]}",
            where=place,
            why=f"they start at 0 and ascend, and it has {len(tokens)} tokens",
        )
    return [
        (token_ids(branch.prompt_token_ids, f"prompt of a branch of {place}"), tokens[begin:end])
        for branch, (begin, end) in zip(branches, pairwise(edges), strict=True)
    ]


def response_places(
    prompt_lengths: NDArray[np.int64], response_lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the indices of the response tokens within all tokens."""
    ends = np.cumsum(prompt_lengths + response_lengths)
    before = np.cumsum(response_lengths) - response_lengths
    offset = ends - response_lengths - before
    places: NDArray[np.int64] = np.arange(int(response_lengths.sum())) + np.repeat(offset, response_lengths)
    return places


def joined_tokens(pieces: Pieces, ids: list[str], limits: ModelLimits) -> NDArray[np.int32]:
    """Join prompt, response, prompt, response, ... into one array and check it against the limits of the model."""
    pairs = zip(pieces.prompts, pieces.responses, strict=True)
    tokens = np.concatenate([part for pair in pairs for part in pair])
    lengths = pieces.lengths
    ids = np.repeat(ids, pieces.counts).tolist()
    limit = limits.max_sequence_tokens
    too_long = np.flatnonzero(lengths > limit) if limit else np.zeros(0, np.intp)
    if len(too_long):
        raise InvalidRequest(
            f"a sequence of {lengths[too_long[0]]} tokens does not fit the model",
            where=sample_place(ids[too_long[0]]),
            why=f"the model takes {limit}",
            next_step="lower rollout.sampling.max_response_tokens, or environment.episode_tokens, or drop long prompts",
        )
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limits.vocabulary))
    if wrong.size:
        owner = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise InvalidRequest(
            f"token id {tokens[wrong[0]]} is not in the vocabulary",
            where=sample_place(ids[owner]),
            why=f"the model has ids 0 to {limits.vocabulary - 1}",
            next_step="use the tokenizer of the model that the trainer holds",
        )
    return tokens.astype(np.int32)


def token_ids(tensor: tensor_pb2.Tensor, where: str) -> Array:
    """Read a list of token ids that is not empty."""
    if not tensor.data:
        raise InvalidRequest("there are no tokens", where=where)
    tokens = from_tensor(tensor)
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise InvalidRequest(
            f"token ids are {tokens.dtype}{list(tokens.shape)}, not a list of integers", where=where
        )
    return tokens


def check_ids(ids: list[str]) -> None:
    """Refuse ids that are empty or repeated."""
    seen: set[str] = set()
    for identifier in ids:
        if not identifier or identifier in seen:
            raise InvalidRequest("an id is empty or repeated", where=sample_place(identifier))
        seen.add(identifier)


def sample_place(identifier: str) -> str:
    """Return the `where` of an error about a sample."""
    return f"sample {identifier!r}"


def teacher_tokens(
    samples: list[pb.TrainSample], lengths: NDArray[np.int64], vocabulary: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]] | tuple[None, None]:
    """Return ids and log-probabilities, both [response tokens, k]; all samples carry them, or none does."""
    if not any(sample.teacher_top_token_ids.data or sample.teacher_top_logprobs.data for sample in samples):
        return None, None
    ids: list[NDArray[Any]] = []
    logprobs: list[NDArray[Any]] = []
    for sample, length in zip(samples, lengths.tolist(), strict=True):
        place = sample_place(sample.sample_id)
        own = _table(sample.teacher_top_token_ids, IDS, "i", length, place)
        theirs = _table(sample.teacher_top_logprobs, LOGPROBS, "f", length, place)
        first = ids[0] if ids else own
        _check_widths(own.shape[1], theirs.shape[1], first.shape[1], place)
        _check_ids(own, vocabulary, place)
        _check_logprobs(theirs, place)
        ids.append(own)
        logprobs.append(theirs)
    return (
        np.concatenate(ids).astype(np.int32, copy=False),
        np.concatenate(logprobs).astype(np.float32, copy=False),
    )


def _table(tensor: tensor_pb2.Tensor, name: str, kind: str, length: int, place: str) -> NDArray[Any]:
    """Read a field with one row for each response token."""
    if not tensor.data:
        raise InvalidRequest(
            f"the field `{name}` is empty",
            where=place,
            why=f"all samples of an update carry {IDS} and {LOGPROBS}, or none does",
        )
    table = from_tensor(tensor)
    if table.ndim != 2 or len(table) != length or table.dtype.kind != kind:
        of = "token ids" if kind == "i" else "numbers"
        raise InvalidRequest(
            f"`{name}` is {table.dtype}{list(table.shape)}, not {of} [{length}, k], one row for each token",
            where=place,
        )
    return table


def _check_widths(ids: int, logprobs: int, first: int, place: str) -> None:
    if ids != logprobs:
        raise InvalidRequest(
            f"`{IDS}` has {ids} tokens at each position, and `{LOGPROBS}` {logprobs}", where=place
        )
    if ids != first:
        raise InvalidRequest(
            f"`{IDS}` has {ids} tokens at each position",
            where=place,
            why=f"the first sample of the update has {first}, and all have as many",
        )


def _check_ids(ids: NDArray[Any], vocabulary: int, place: str) -> None:
    ordered = np.sort(ids, axis=-1)
    if ordered.min() < 0 or ordered.max() >= vocabulary:
        raise InvalidRequest(
            f"`{IDS}` holds a token that the model does not have",
            where=place,
            why=f"ids are 0 to {vocabulary - 1}",
            next_step="take a teacher with the vocabulary of the policy, or a smaller algorithm.teacher.top_k",
        )
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise InvalidRequest(f"`{IDS}` names a token twice at one position", where=place)


def _check_logprobs(logprobs: NDArray[Any], place: str) -> None:
    if not np.isfinite(logprobs).all():
        raise InvalidRequest(f"`{LOGPROBS}` holds a number that is not finite", where=place)
    largest = logprobs.max()
    if largest > ROUNDING:
        raise InvalidRequest(
            f"`{LOGPROBS}` holds {largest:g}, and no logarithm of a probability is above 0", where=place
        )
    mass = np.exp(logprobs).sum(-1).max()
    if mass > 1 + ROUNDING:
        raise InvalidRequest(
            f"`{LOGPROBS}` gives the tokens of one position a probability of {mass:g} together, which is above 1",
            where=place,
        )
