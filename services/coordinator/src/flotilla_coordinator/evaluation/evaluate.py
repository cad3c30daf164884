"""Evaluates the policy on sets of held-out prompts, and on held-out pairs of answers.

Invariants: evaluation samples never enter the ledger or an update. An answer is right when its reward total reaches the
threshold of its set, and each prompt of a set gets equally many answers. An answer that has no reward is counted and
is in no figure: a reward error or timeout is never a wrong answer. Where that happens to more answers of a set than
training bears, the evaluation fails. Accuracy is the mean over prompts of the share of their answers that are right;
for pairs it is the share in which the trainer ranks the preferred answer higher, however the pairs are cut into calls.
Of several sets, the plain names are those of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

from flotilla_coordinator.data.prompts import Prompt, PromptFile
from flotilla_coordinator.data.training_sets import HeldOut
from flotilla_coordinator.evaluation.figures import figures_of, vote_of
from flotilla_coordinator.ledger.verdicts import extracted, named_parts, part_means
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample, given_group
from flotilla_coordinator.rollouts.generation import EVALUATION, GenerationRequest, Sampler
from flotilla_coordinator.rollouts.scoring import Outcome, Scorer, score_item
from flotilla_coordinator.trainers.messages import parts
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_core import telemetry
from flotilla_core.config import RewardMode, RewardTermConfig, RunConfig, SamplingConfig
from flotilla_core.errors import UserCodeError
from flotilla_core.evaluations import ACCURACY, UNSCORED, UNVERIFIABLE, named
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.telemetry import names
from flotilla_core.version import Version

ANSWERS_PER_SCORE_CALL = 64
CONCURRENT_ANSWERS = 256

PREFERRED = "preference/accuracy"


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to a held-out prompt, as it was scored."""

    held_out: str
    """The name of its set."""
    prompt: Prompt
    sample: RolloutSample
    outcome: Outcome

    @property
    def reward(self) -> float | None:
        """Return the total, or None where a reward failed; no response leaves the figures by being unverifiable."""
        return 0.0 if self.outcome.total is None and self.outcome.unverifiable else self.outcome.total

    def is_right(self, success_at: float) -> bool:
        """Return whether the total is enough; a response without one never is."""
        return self.outcome.total is not None and self.outcome.total >= success_at

    def record(self, step: int, version: Version) -> dict[str, Any]:
        """Return the line that the run directory keeps."""
        prompt, sample = self.prompt, self.sample
        return {
            "step": step,
            "policy_version": str(version),
            "set": self.held_out,
            "sample_id": sample.sample_id,
            "prompt_index": prompt.index,
            "prompt": prompt.prompt_text,
            "response": sample.text,
            "answer": prompt.answer,
            "info": prompt.info,
            "reward": self.reward,
            "reward_parts": [
                {"reward": name, "value": value} for name, value in named_parts(self.outcome.verdicts)
            ],
            "verdicts": [verdict.record() for verdict in self.outcome.verdicts],
            "failure": self.outcome.failure,
            "prompt_tokens": len(prompt.token_ids),
            "response_tokens": len(sample.token_ids),
            "truncated": sample.truncated,
            "generator": sample.generator,
            **({} if sample.episode is None else {"episode": sample.episode.shown()}),
        }


@dataclass(frozen=True)
class HeldOutResult:
    """The figures of one held-out set."""

    prompts: int
    """The number of prompts, or of pairs."""
    metrics: dict[str, float]
    """Metrics by their plain names."""
    unscored: str = ""
    """The number of answers that have no reward, and why the first of them has none; empty where all have one."""


@dataclass(frozen=True)
class Evaluation:
    """The accuracy, by which runs are steered, and other metrics of the same evaluation."""

    accuracy: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics by the names under which they are recorded."""
    answers: tuple[HeldOutAnswer, ...] = ()
    """The answers that were generated, set by set and prompt by prompt."""
    sets: Mapping[str, HeldOutResult] = field(default_factory=dict)
    """The same figures, set by set."""

    @classmethod
    def of_sets(cls, sets: Mapping[str, HeldOutResult], answers: Iterable[HeldOutAnswer] = ()) -> Evaluation:
        """Join the figures of all sets; those of the first one have the plain names as well."""
        metrics = dict(next(iter(sets.values())).metrics)
        accuracy = metrics.pop(ACCURACY)
        if len(sets) > 1:
            for name, found in sets.items():
                metrics |= named(name, found.metrics)
        return cls(accuracy, metrics, tuple(answers), sets)

    @property
    def unscored(self) -> str:
        """Return what is known of answers that have no reward; empty where all have one."""
        return "; ".join(one.unscored for one in self.sets.values() if one.unscored)

    @property
    def figures(self) -> dict[str, float]:
        """All metrics, with the accuracy."""
        return {ACCURACY: self.accuracy, **self.metrics}


@dataclass(frozen=True)
class HeldOutPrompts:
    """The prompts of one set, and how their answers are drawn and judged."""

    name: str
    prompts: list[Prompt]
    scorer: Scorer
    sampling: SamplingConfig
    samples_per_prompt: int = 1
    success_at: float = 1.0
    answer_after: str = ""


def held_out_prompts(
    config: RunConfig,
    held_out: Iterable[tuple[HeldOut, PromptFile]],
    scorer_of: Callable[[tuple[RewardTermConfig, ...], RewardMode], Scorer],
) -> list[HeldOutPrompts]:
    """Return the sets of a run as it evaluates them; answers end as rollouts do."""
    rollout = config.rollout.sampling
    return [
        HeldOutPrompts(
            one.name,
            file.prompts,
            scorer_of(one.rewards, one.reward_mode),
            SamplingConfig(
                temperature=one.temperature,
                max_response_tokens=one.max_response_tokens,
                stop_token_ids=rollout.stop_token_ids,
                stop=rollout.stop,
            ),
            one.samples_per_prompt,
            one.success_at,
            one.answer_after,
        )
        for one, file in held_out
    ]


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
        sets: Sequence[HeldOutPrompts],
        sampler: Sampler,
        timeout_s: float,
        max_failure_rate: float = 0.0,
    ) -> None:
        """`max_failure_rate` is the largest share of the answers of a set that may have no reward."""
        self._run_id = run_id
        self._sets = sets
        self._sampler = sampler
        self._timeout_s = timeout_s
        self._max_failure_rate = max_failure_rate

    async def evaluate(self, version: Version, step: int, on: str = "") -> Evaluation:
        """Evaluate `version` on all sets, with the instance `on` alone where one is given."""
        most = max(one.samples_per_prompt for one in self._sets)
        with evaluation_span(self._run_id, version, step):
            gate = asyncio.Semaphore(max(1, CONCURRENT_ANSWERS // most))
            answered = await gather_or_cancel(
                self._answers(one, version, step, gate, on) for one in self._sets
            )
        sets = {}
        for one, answers in zip(self._sets, answered, strict=True):
            unscored = self._unscored(one, answers, step)
            # Many answers to a prompt have many majorities: other work of the coordinator goes on meanwhile.
            figures = await asyncio.to_thread(_figures, one, answers)
            sets[one.name] = HeldOutResult(len(one.prompts), figures, unscored)
        return Evaluation.of_sets(sets, (answer for answers in answered for answer in answers))

    async def _answers(
        self, one: HeldOutPrompts, version: Version, step: int, gate: asyncio.Semaphore, on: str
    ) -> list[HeldOutAnswer]:
        """Return the scored answers to each prompt of a set in turn, each prompt's in the order of their ids."""
        drawn = await gather_or_cancel(self._drawn(one, prompt, version, gate, on) for prompt in one.prompts)
        answers = [(prompt, sample) for prompt, of in zip(one.prompts, drawn, strict=True) for sample in of]
        needs = await one.scorer.needs()
        outcomes: dict[str, Outcome] = {}
        # The answers to a prompt stay together.
        most = max(1, ANSWERS_PER_SCORE_CALL // one.samples_per_prompt) * one.samples_per_prompt
        for start in range(0, len(answers), most):
            items = [
                score_item(
                    sample.sample_id,
                    prompt,
                    sample.text,
                    group=sample.sample_id.rpartition("/")[0],
                    token_ids=sample.token_ids if needs.token_ids else None,
                    step=step,
                )
                for prompt, sample in answers[start : start + most]
                if sample.outcome is None  # as that of an episode whose environment failed is not
            ]
            outcomes |= await one.scorer.score(items)
        for _, sample in answers:
            if sample.outcome is None:
                sample.take_outcome(outcomes[sample.sample_id])
        return [
            HeldOutAnswer(one.name, prompt, sample, sample.outcome)
            for prompt, sample in answers
            if sample.outcome is not None
        ]

    def _unscored(self, one: HeldOutPrompts, answers: Sequence[HeldOutAnswer], step: int) -> str:
        """Say which answers have no reward; raise where they are too many."""
        failed = [answer.outcome for answer in answers if answer.outcome.failed]
        if not failed:
            return ""
        found = f"{len(failed)} of {len(answers)} held-out answers could not be scored"
        scored = any(answer.reward is not None for answer in answers)
        if len(failed) <= self._max_failure_rate * len(answers) and scored:
            of = f" ({one.name})" if len(self._sets) > 1 else ""
            return f"{found}{of}: {failed[0].report}"
        raise UserCodeError(
            found,
            where=f"evaluation at step {step}",
            why=failed[0].report,
            next_step="fix the reward function or raise its timeout_s (limit: rollout.max_reward_failure_rate)",
        )

    async def _drawn(
        self, one: HeldOutPrompts, prompt: Prompt, version: Version, gate: asyncio.Semaphore, on: str
    ) -> list[RolloutSample]:
        of = f"{one.name}/" if len(self._sets) > 1 else ""
        name = f"{self._run_id}/eval/{version}/{of}{prompt.index}"
        sample_ids = tuple(f"{name}/{number}" for number in range(one.samples_per_prompt))
        request = GenerationRequest(
            prompt.token_ids,
            sample_ids,
            one.sampling,
            version,
            self._timeout_s,
            max_attempts=5,
            priority=EVALUATION,
            instance_id=on,
            prompt=prompt,
            world="/".join(("evaluation", f"{of}{prompt.index}")),
        )
        async with gate, aclosing(self._sampler.samples(request)) as samples:
            ended = {sample.sample_id: sample async for sample in samples}
        return [ended[sample_id] for sample_id in sample_ids]


def _figures(one: HeldOutPrompts, answers: list[HeldOutAnswer]) -> dict[str, float]:
    drawn = one.samples_per_prompt
    of_prompts = [answers[start : start + drawn] for start in range(0, len(answers), drawn)]
    read = {answer.sample.sample_id: extracted(answer.outcome.verdicts) for answer in answers}
    by_verifier = not one.answer_after and any(vote is not None for vote in read.values())

    def vote(answer: HeldOutAnswer) -> str | None:
        if by_verifier:
            return read[answer.sample.sample_id]
        return vote_of(answer.sample.text, one.answer_after)

    found = figures_of(
        [[answer.reward for answer in of] for of in of_prompts],
        [[vote(answer) for answer in of] for of in of_prompts],
        [[answer.is_right(one.success_at) for answer in of] for of in of_prompts],
    )
    outcomes = [answer.outcome for answer in answers]
    means = part_means(outcome.verdicts for outcome in outcomes)
    found |= {f"eval/part:{name}": mean for name, mean in means.items() if name.endswith("]")}
    found[UNSCORED] = sum(outcome.failed for outcome in outcomes) / len(outcomes)
    found[UNVERIFIABLE] = sum(outcome.unverifiable for outcome in outcomes) / len(outcomes)
    return found


class PairEvaluator:
    """Evaluates a version on held-out pairs by how often the trainer ranks the preferred answer higher."""

    needs_generators = False

    def __init__(self, run_id: str, sets: Mapping[str, list[Prompt]], policy: PolicyTrainer) -> None:
        self._run_id = run_id
        self._sets = sets
        self._policy = policy

    async def evaluate(self, version: Version, step: int) -> Evaluation:
        """Return the share of held-out pairs that `version` ranks right; a tie counts half."""
        with evaluation_span(self._run_id, version, step):
            sets = {
                name: HeldOutResult(len(pairs), {ACCURACY: await self._ranked_right(pairs)})
                for name, pairs in self._sets.items()
            }
        return Evaluation.of_sets(sets)

    async def _ranked_right(self, prompts: list[Prompt]) -> float:
        right = 0.0
        for groups in parts(self._groups(prompts)):
            metrics = await self._policy.evaluate_loss(groups)
            right += metrics[PREFERRED] * len(groups)
        return right / len(prompts)

    def _groups(self, prompts: list[Prompt]) -> Iterator[RolloutGroup]:
        """Yield each pair as a group of two answers."""
        for prompt in prompts:
            yield given_group(self._run_id, prompt)
