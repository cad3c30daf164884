"""The tokens that a teacher finds likeliest at each position of an update, checked.

Invariants: they are there for all samples or for none, as many at every position; whatever is wrong is refused, naming
the sample and the field.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.common.v1 import tensor_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor
from flotilla_trainer.sequence_tokens import sample_place

IDS, LOGPROBS = "teacher_top_token_ids", "teacher_top_logprobs"
ROUNDING = 1e-3
"""By how much the probabilities of a position may add up to more than one."""


def teacher_tokens(
    samples: list[pb.TrainSample], lengths: NDArray[np.int64], vocabulary: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]] | tuple[None, None]:
    """Ids and log-probabilities, [response tokens, k] both; all samples carry them, or none does."""
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
    """Of a field, one row a response token."""
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
