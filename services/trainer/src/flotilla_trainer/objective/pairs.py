"""Preferences between two answers, learned by a policy or by a reward model.

Invariants: a group is a pair, the preferred sample first; the update is scored first, and its gradient is then a
weighted sum over tokens. A policy's loss of a pair depends on its two sequences by their summed log-probabilities
alone, and a reward model's by their two rewards. So the derivative by these, times the log-probabilities of the
tokens or the rewards, has the gradient of the loss. That holds however the update is cut and wherever the two
sequences of a pair go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import PAIR_LOSSES, PairLosses
from flotilla_core.config import DpoConfig, RewardModelConfig
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import NOTHING_FOLLOWS, sample_place
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.base import SessionObjective

Floats = NDArray[np.float64]
Scores = NDArray[np.float32]


class _OnPairs(SessionObjective):
    """An objective that learns from pairs, by a weighted sum whose weights come from scores before the update."""

    unit = "pairs"

    def scores_policy(self, *, several_steps: bool) -> bool:
        """Return True: the model that learns scores every update before the update trains it."""
        return True

    def units(self, batch: UpdateBatch) -> float:
        """Count the pairs of a batch."""
        return float(len(batch.group_sizes))

    def metric_weight(self, batch: UpdateBatch) -> float:
        """Return the number of pairs, over which the metrics of a batch are averaged."""
        return self.units(batch)


class PairObjective(_OnPairs):
    """Learns preferences of a policy from pairs of answers."""

    def __init__(self, preference: DpoConfig) -> None:
        self._preference = preference

    def scores_reference(self, batch: UpdateBatch) -> bool:
        """Return whether the ranks have to score the batch by the policy that the session started from."""
        return not self._preference.reference_free and batch.reference_logprobs is None

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: Scores | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Sequences with their columns, and metrics; `policy` scores every response token. One step, so one part."""
        check_pairs(batch)
        assert policy is not None, "asked for by scores_policy"
        logprobs = _sums(batch, policy)
        ahead = logprobs
        if not self._preference.reference_free:
            assert batch.reference_logprobs is not None, "sent, or scored by the ranks"
            ahead = logprobs - _sums(batch, batch.reference_logprobs)
        margins: Floats = ahead[0::2] - ahead[1::2]
        pairs = self._losses(margins)
        # What a summed log-probability of a chosen answer does to the mean loss; a rejected one does the opposite.
        pulls: Floats = np.stack([-pairs.slopes, pairs.slopes], axis=1).ravel() / len(margins)
        metrics = pair_metrics(pairs.losses, self._preference.beta * ahead) | {
            "preference/chosen_logprob": float(logprobs[0::2].mean()),
            "preference/rejected_logprob": float(logprobs[1::2].mean()),
        }
        return batch.sequences({"weights": np.repeat(pulls, batch.response_lengths)}), metrics

    def _losses(self, margins: Floats) -> PairLosses:
        name = self._preference.loss
        smoothing = {"label_smoothing": self._preference.label_smoothing} if name == "sigmoid" else {}
        return PAIR_LOSSES[name](margins, beta=self._preference.beta, **smoothing)


def check_pairs(batch: UpdateBatch) -> None:
    """Refuse groups that are no pairs of different answers, naming a sample."""
    firsts = np.cumsum(batch.group_sizes) - batch.group_sizes
    wrong = np.flatnonzero(batch.group_sizes != 2)
    if wrong.size:
        raise InvalidRequest(
            f"a pair has two samples, this group has {batch.group_sizes[wrong[0]]}",
            where=sample_place(batch.sample_ids[firsts[wrong[0]]]),
            next_step="send one group for each pair, the preferred sample first",
        )
    ends = np.cumsum(batch.response_lengths)
    parts = [slice(end - length, end) for end, length in zip(ends, batch.response_lengths, strict=True)]
    answers = batch.tokens[batch.all_responses().scored]
    for index, part in enumerate(parts):
        where = sample_place(batch.sample_ids[index])
        if not batch.trained[part].any():
            raise InvalidRequest(
                "no token of an answer counts", where=where, why="its mask is false throughout"
            )
        if index % 2 and np.array_equal(answers[part], answers[parts[index - 1]]):
            raise InvalidRequest(
                "both answers of a pair are the same", where=where, next_step="leave the pair out"
            )


def _sums(batch: UpdateBatch, logprobs: Scores) -> Floats:
    """Sum the log-probabilities of the trained tokens of each sample."""
    values = np.where(batch.trained, logprobs.astype(np.float64), 0.0)
    sums: Floats = np.add.reduceat(values, np.cumsum(batch.response_lengths) - batch.response_lengths)
    return sums


class RewardUpdate(_OnPairs):
    """Trains a reward model on pairs of answers."""

    writes_samples = False
    """A reward model writes nothing: the versions of the tokens are another model's."""

    def __init__(self, section: RewardModelConfig) -> None:
        self._center = section.center_coefficient

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Make the answers with the weights of their rewards, and metrics; `policy` has the reward of each."""
        check_pairs(batch)
        _check_whole(batch)
        assert policy is not None, "asked for by scores_policy"
        rewards = policy.astype(np.float64)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins, sums = chosen - rejected, chosen + rejected
        pairs = PAIR_LOSSES["sigmoid"](margins, beta=1.0)
        # What a reward does to the loss: one way by its lead, and for both of a pair alike by their distance from zero.
        centring = 2.0 * self._center * sums
        pulls = np.stack([centring + pairs.slopes, centring - pairs.slopes], axis=1).ravel() / len(margins)
        metrics = pair_metrics(pairs.losses + self._center * sums**2, rewards)
        return after_answers(batch, {"weights": pulls, "answer_tokens": batch.response_lengths}), metrics


def after_answers(batch: UpdateBatch, columns: dict[str, NDArray[Any]] | None = None) -> Sequences:
    """Whole sequences, each scored at one place: after its last token; `columns` have a number for each."""
    lengths = batch.pieces.lengths
    return Sequences(
        tokens=np.insert(batch.tokens, np.cumsum(lengths), NOTHING_FOLLOWS),
        lengths=lengths + 1,
        scored=np.cumsum(lengths + 1) - 1,
        columns={name: column.astype(np.float32) for name, column in (columns or {}).items()},
    )


def _check_whole(batch: UpdateBatch) -> None:
    """Refuse answers that count in part: a reward is about all of them."""
    wrong = np.flatnonzero(~batch.trained)
    if wrong.size:
        owner = int(np.searchsorted(np.cumsum(batch.response_lengths), wrong[0], side="right"))
        raise InvalidRequest(
            "a reward model cannot leave out a part of an answer",
            where=sample_place(batch.sample_ids[owner]),
            why="its mask is false for some tokens, and its reward is one number for all of them",
            next_step="leave the mask out",
        )


def pair_metrics(losses: Floats, rewards: Floats) -> dict[str, float]:
    """Compute metrics from the loss of each pair and the reward of each answer, the preferred one of a pair first."""
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins: Floats = chosen - rejected
    return {
        "loss": float(losses.mean()),
        "preference/accuracy": _preferred_share(margins),
        "preference/margin": float(margins.mean()),
        "preference/chosen_reward": float(chosen.mean()),
        "preference/rejected_reward": float(rejected.mean()),
    }


def _preferred_share(margins: Floats) -> float:
    """Share of pairs whose preferred answer is ahead; one without a difference counts half."""
    return float(np.mean((margins > 0) + 0.5 * (margins == 0)))
