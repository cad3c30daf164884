"""What the samples of an update say beside their tokens, checked, as one column over all of them.

Invariants: a column is there for all samples or for none; whatever is wrong is refused, naming the sample; per-token
columns cover the responses one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_trainer.sequence_tokens import sample_place


def numbers(
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
    column: NDArray[np.float32] = np.concatenate(arrays).astype(np.float32)
    return column


def reward_terms(samples: list[pb.TrainSample]) -> NDArray[np.float64] | None:
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


def greedy_rewards(groups: Sequence[pb.TrainGroup]) -> NDArray[np.float64] | None:
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


def values_after(samples: list[pb.TrainSample]) -> NDArray[np.float64] | None:
    """Return one finite number a sample, or None where no sample carries one."""
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
    """Which tokens train: all of a sample that says nothing."""
    masks = []
    for sample, length in zip(samples, lengths, strict=True):
        mask = from_tensor(sample.mask) if sample.mask.data else np.ones(length, np.bool_)
        if mask.shape != (length,) or mask.dtype != np.bool_:
            raise InvalidRequest(
                f"`mask` holds {mask.size} flags for {length} tokens", where=sample_place(sample.sample_id)
            )
        masks.append(mask)
    return np.concatenate(masks)


def ages(
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
