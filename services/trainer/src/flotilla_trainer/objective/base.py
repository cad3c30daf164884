"""The base of a session's objectives, and the checks that refuse samples which lack what an objective needs.

Invariant: an update that lacks a column is refused before a rank sees anything of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import counted_units
from flotilla_core.config.advantages import AdvantageConfig, GaeAdvantage
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import sample_place
from flotilla_trainer.batch.update_batch import UpdateBatch

TOKEN_MEAN = "token_mean"
WHOLE_UPDATES = "updates"
"""The unit of an objective that sums: all calls of a step are one update, however many there are."""

ADVANTAGE_NEEDS = {
    "gae": (
        "values",
        "ask the critic for them with ComputeValues, or set `critic: {}` in the run's algorithm",
    ),
    "gdpo": ("reward_terms", "send what each term of the reward gave, in the order of advantage.weights"),
    "remax": (
        "greedy_reward",
        "send what the greedy response to the prompt earned, with each of its samples",
    ),
    "distill": ("teacher_logprobs", "ask the teacher for them with ComputeLogprobs"),
}


class SessionObjective(ABC):
    """An objective of a session, which the front applies to one update after the other.

    Unless it says otherwise, its loss is a mean over all trained tokens, compares them with no policy, and makes no
    advantages; so nothing is scored before an update, and nothing changes from step to step.
    """

    unit = "tokens"
    """The unit over which its losses are averaged."""
    writes_samples = True
    """True where the versions of tokens are versions of the model that learns."""
    temperature = 1.0
    """The temperature under which tokens are judged: at 1 by the unchanged distribution of the model."""

    def scores_reference(self, batch: UpdateBatch) -> bool:
        """Return whether the ranks have to score the batch by the policy that the session started from."""
        return False

    def scores_distributions(self, batch: UpdateBatch) -> bool:
        """Return whether advantages need the policy's whole distribution at every token, as it is before the update."""
        return False

    def scores_policy(self, *, several_steps: bool) -> bool:
        """Return whether the model that learns has to score an update before the update trains it."""
        return False

    @abstractmethod
    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Make the sequences with their columns, and metrics; `policy` scores every response token.

        Each of the `parts`, masks of the response tokens, has its own denominator; without any the whole is one.
        """

    def units(self, batch: UpdateBatch) -> float:
        """Count the units of a batch."""
        return counted_units(TOKEN_MEAN, batch.response_lengths, batch.trained)

    def metric_weight(self, batch: UpdateBatch) -> float:
        """Return the weight of a batch in the mean of its metrics with those of other batches."""
        return float(batch.trained.sum())

    def adapt(self, metrics: dict[str, float], samples: int) -> None:  # noqa: B027 - most objectives stay as they are
        """Update what changes from step to step, after a step."""

    def state(self) -> dict[str, Any]:
        """Return what updates have changed here, for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - as above
        """Take over the state of an earlier session."""


def check_logprobs(batch: UpdateBatch, what: str) -> None:
    """Refuse samples without the log-probabilities of the rollout."""
    _require(batch, "logprobs", f"{what} needs the rollout's log-probabilities")


def check_advantage(batch: UpdateBatch, advantage: AdvantageConfig) -> None:
    """Refuse samples that lack what their advantages are made of; advantages that were sent need nothing."""
    name = advantage.type
    if batch.advantages is not None:
        return
    if name == "gigpo":
        _check_states(batch)
    if name not in ADVANTAGE_NEEDS:
        return
    column, next_step = ADVANTAGE_NEEDS[name]
    _require(batch, column, f"the advantage {name} needs more than rewards", next_step)
    if name == "distill":
        check_logprobs(batch, "the advantage distill")
    if isinstance(advantage, GaeAdvantage):
        _check_value_after(batch, advantage)


def _check_states(batch: UpdateBatch) -> None:
    """Refuse an update in which no turn names the state that it was asked in."""
    if batch.turn_states is None:
        raise InvalidRequest(
            "the advantage gigpo compares turns that were asked in the same state",
            where=sample_place(batch.sample_ids[0]),
            why="no turn of the update names its state",
            next_step="let the environment name them (`state` of Begun and Reply, or of TurnAsked), or take "
            "step_reinforce or grpo",
        )


def check_values(batch: UpdateBatch, advantage: GaeAdvantage) -> None:
    """Refuse samples without the values that returns are made from, whatever else came with them."""
    _, next_step = ADVANTAGE_NEEDS["gae"]
    _require(batch, "values", "a critic needs the values from before the update", next_step)
    _check_value_after(batch, advantage)


def _check_value_after(batch: UpdateBatch, advantage: GaeAdvantage) -> None:
    """Refuse a truncated response without the value that the critic expects after it."""
    if not (advantage.bootstrap_truncated and batch.truncated.any()):
        return
    _require(
        batch,
        "value_after",
        "a response that was cut off needs what the critic expects after it",
        "ask for it with ComputeValues (after_last), or set advantage.bootstrap_truncated to false",
    )


def check_reference(batch: UpdateBatch, why: str) -> None:
    """Refuse samples without the log-probabilities of the reference, which no part of this gang can compute."""
    next_step = (
        "ask for them with ComputeLogprobs, or let the trainer keep the reference (kl.reference: frozen)"
    )
    _require(batch, "reference_logprobs", f"{why} needs the reference's log-probabilities", next_step)


def check_teacher_tokens(batch: UpdateBatch, top_k: int) -> None:
    """Refuse samples without the tokens that the teacher finds likeliest, or with more of them than were asked for."""
    next_step = "ask the teacher for them with ComputeLogprobs (top_k)"
    what = "algorithm.teacher needs the likeliest tokens of the teacher"
    _require(batch, "teacher_top_token_ids", what, next_step)
    assert batch.teacher_top_token_ids is not None, "required above"
    sent = batch.teacher_top_token_ids.shape[1]
    if sent > top_k:
        raise InvalidRequest(
            f"`teacher_top_token_ids` has {sent} tokens at each position",
            where=sample_place(batch.sample_ids[0]),
            why=f"algorithm.teacher.top_k is {top_k}",
            next_step="send the likeliest ones alone",
        )


def _require(batch: UpdateBatch, column: str, what: str, next_step: str = "") -> None:
    if getattr(batch, column) is None:
        raise InvalidRequest(
            what,
            where=sample_place(batch.sample_ids[0]),
            why=f"the field `{column}` is empty",
            next_step=next_step,
        )
