"""Evaluates the policy on held-out prompts, and on held-out pairs of answers.

Invariants: evaluation samples never enter the ledger or an update. An answer is right when its reward total is at least
1, and each prompt gets equally many answers. A reward error or timeout is a failure of the evaluation, never a wrong
answer. Accuracy is the share of all answers that are right; for pairs it is the share in which the trainer ranks the
preferred answer higher, however the pairs are cut into calls. pass@k is the unbiased estimate of how often at least one
of k answers to a prompt is right, from all answers that were drawn, so k is never above their number.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

from flotilla.reward.v1 import reward_pb2
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.rollouts.answers import given_group
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_coordinator.rollouts.generation import EVALUATION, Generation, GenerationRequest
from flotilla_coordinator.rollouts.scoring import RIGHT_AT, Outcome, Scorer, score_item
from flotilla_coordinator.trainers.messages import parts
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_core import telemetry
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import UserCodeError
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.telemetry import names
from flotilla_core.version import Version

ANSWERS_PER_SCORE_CALL = 64
CONCURRENT_ANSWERS = 256

ACCURACY = "preference/accuracy"


@dataclass(frozen=True)
class Evaluation:
    """The accuracy, by which runs are steered, and other metrics of the same evaluation."""

    accuracy: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics by the names under which they are recorded."""

    @classmethod
    def of_answers(cls, right: Sequence[int], drawn: int) -> Evaluation:
        """Compute the metrics from the number of right answers to each prompt, of `drawn` answers each."""
        accuracy = sum(right) / (len(right) * drawn)
        if drawn == 1:
            return cls(accuracy)
        sizes = [1 << power for power in range(drawn.bit_length())]
        passes = {f"eval/pass@{k}": sum(pass_at(k, c, drawn) for c in right) / len(right) for k in sizes}
        return cls(accuracy, {f"eval/mean@{drawn}": accuracy, **passes})


def pass_at(k: int, right: int, drawn: int) -> float:
    """Return the share of all sets of k drawn answers that contain a right one."""
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)


def evaluation_span(run_id: str, version: Version, step: int) -> AbstractContextManager[Any]:
    """Open the span of one evaluation on the timeline."""
    attributes: dict[str, str | int] = {
        names.RUN_ID: run_id,
        names.STEP: step,
        names.POLICY_VERSION: str(version),
    }
    return telemetry.span(names.RL_EVALUATE, attributes=attributes)


class Evaluator:
    """Answers every held-out prompt equally often with one version."""

    needs_generators = True

    def __init__(
        self,
        run_id: str,
        prompts: list[Prompt],
        generation: Generation,
        scorer: Scorer,
        sampling: SamplingConfig,
        samples_per_prompt: int,
        timeout_s: float,
    ) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._generation = generation
        self._scorer = scorer
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._timeout_s = timeout_s

    async def evaluate(self, version: Version, step: int, on: str = "") -> Evaluation:
        """Evaluate `version` on the held-out prompts, with the instance `on` alone where one is given."""
        with evaluation_span(self._run_id, version, step):
            gate = asyncio.Semaphore(max(1, CONCURRENT_ANSWERS // self._samples_per_prompt))
            answered = await gather_or_cancel(
                self._answer(prompt, version, gate, on) for prompt in self._prompts
            )
            items = [item for answers in answered for item in answers]
            outcomes: dict[str, Outcome] = {}
            for start in range(0, len(items), ANSWERS_PER_SCORE_CALL):
                outcomes |= await self._scorer.score(items[start : start + ANSWERS_PER_SCORE_CALL])
        self._refuse_failures(list(outcomes.values()), step)
        right = [sum(_right(outcomes[item.sample_id]) for item in answers) for answers in answered]
        return Evaluation.of_answers(right, self._samples_per_prompt)

    @staticmethod
    def _refuse_failures(outcomes: list[Outcome], step: int) -> None:
        failed = [outcome for outcome in outcomes if outcome.total is None]
        if failed:
            raise UserCodeError(
                f"{len(failed)} of {len(outcomes)} held-out answers could not be scored",
                where=f"evaluation at step {step}",
                why=failed[0].report,
                next_step="fix the reward function or raise its timeout_s",
            )

    async def _answer(
        self, prompt: Prompt, version: Version, gate: asyncio.Semaphore, on: str
    ) -> list[reward_pb2.ScoreItem]:
        name = f"{self._run_id}/eval/{version}/{prompt.index}"
        sample_ids = tuple(f"{name}/{number}" for number in range(self._samples_per_prompt))
        request = GenerationRequest(
            prompt.token_ids,
            sample_ids,
            self._sampling,
            version,
            self._timeout_s,
            max_attempts=5,
            priority=EVALUATION,
            instance_id=on,
        )
        async with gate, aclosing(self._generation.samples(request)) as samples:
            return [score_item(sample, prompt) async for sample in samples]


def _right(outcome: Outcome) -> bool:
    return outcome.total is not None and outcome.total >= RIGHT_AT


class PairEvaluator:
    """Evaluates a version on held-out pairs by how often the trainer ranks the preferred answer higher."""

    needs_generators = False

    def __init__(self, run_id: str, prompts: list[Prompt], policy: PolicyTrainer) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._policy = policy

    async def evaluate(self, version: Version, step: int) -> Evaluation:
        """Return the share of held-out pairs that `version` ranks right; a tie counts half."""
        with evaluation_span(self._run_id, version, step):
            right = 0.0
            for groups in parts(self._groups()):
                metrics = await self._policy.evaluate_loss(groups)
                right += metrics[ACCURACY] * len(groups)
        return Evaluation(right / len(self._prompts))

    def _groups(self) -> Iterator[RolloutGroup]:
        """Yield each pair as a group of two answers."""
        for prompt in self._prompts:
            assert prompt.pair is not None, "held-out data of such a run is read in pairs"
            yield given_group(self._run_id, prompt, [prompt.pair.chosen, prompt.pair.rejected])
