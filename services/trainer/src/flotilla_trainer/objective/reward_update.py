"""A reward model's objective: the update is scored first, and its gradient is then a weighted sum of rewards.

Invariants: a group is a pair, the preferred sample first; the reward of an answer is the one number after its last
token; a pair's loss depends on its two rewards alone, so its derivatives by them, times the rewards, have the gradient
of the loss, however the update is cut and wherever the two answers of a pair go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_algorithms import PAIR_LOSSES
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import NOTHING_FOLLOWS, sample_place
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.pair_metrics import pair_metrics
from flotilla_trainer.objective.pair_objective import check_pairs
from flotilla_trainer.objective.unchanging import Unchanging


class RewardUpdate(Unchanging):
    """What the ranks of a reward model need of an update of pairs, and what it says about itself."""

    unit = "pairs"
    """What its losses are a mean over."""
    writes_samples = False
    """A reward model writes nothing: the versions of the tokens are another model's."""
    temperature = 1.0

    def __init__(self, objective: pb.RewardModelObjective) -> None:
        self._center = objective.center_coefficient

    def scores_reference(self, batch: UpdateBatch) -> bool:
        """Never: rewards are compared with each other alone."""
        return False

    def scores_distributions(self, batch: UpdateBatch) -> bool:
        """Never: no advantage is made of them."""
        return False

    def scores_policy(self, *, several_steps: bool) -> bool:
        """Updates are scored by the model before they train it, always."""
        return True

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Answers with the weights of their rewards, and metrics; `policy` has the reward of each. One step."""
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

    def units(self, batch: UpdateBatch) -> float:
        """How many pairs a batch has."""
        return float(len(batch.group_sizes))

    def facts_share(self, batch: UpdateBatch) -> float:
        """What the metrics of a batch are means over: its pairs."""
        return self.units(batch)


def after_answers(batch: UpdateBatch, columns: dict[str, NDArray[Any]] | None = None) -> Sequences:
    """Whole sequences, each scored at one place: after its last token; `columns` have a number for each."""
    lengths = batch.prompt_lengths + batch.response_lengths
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
