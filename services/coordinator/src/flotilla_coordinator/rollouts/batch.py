"""The data of a step: samples in groups, the groups in a batch, and the metrics of the batch.

Invariants: a group holds only samples that were scored. Token ids and log-probabilities are the generator's own, never
tokenized again. `group_id` and `sample_id` never change between attempts. Metrics have the names of the metrics
reference.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from opentelemetry.trace import SpanContext

from flotilla_coordinator.data.prompts import Prompt, RecordedSample
from flotilla_coordinator.ledger.records import Branch, DropReason, Episode, FinishedSample
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict, part_means
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core import ids
from flotilla_core.config import RunConfig
from flotilla_core.version import Version
from flotilla_data.chats import Messages


@dataclass
class RolloutSample(FinishedSample):
    """A finished response, scored or (in supervised training) given, with the other columns for the trainer."""

    instance_ids: frozenset[str] = frozenset()
    """The generators that wrote it, each from its start to its end; none for a sample that was recorded before."""
    generator_s: float = 0.0
    """The time that it took by what its generators say, waits for a place there included."""
    outcome: Outcome | None = None
    """The result of the rewards in this attempt at the step; None for a sample that was scored before, or given."""
    played: Outcome | None = None
    """The result of its episode, by what the environment says; None for a single response."""
    greedy: Outcome | None = None
    """The result of the rewards for the greedy response, where one was drawn in this attempt."""
    values: np.ndarray | None = None
    """The critic's values before each token, where the run has a critic."""
    value_after: float | None = None
    """The critic's value after the last token."""
    reference_logprobs: np.ndarray | None = None
    """Each token's log-probability under the first policy, where a gang other than the policy's computes or needs it.
    """
    teacher_logprobs: np.ndarray | None = None
    teacher_top_token_ids: np.ndarray | None = None
    """The shape is [tokens, k]: the teacher's likeliest tokens, where the run learns from them."""
    teacher_top_logprobs: np.ndarray | None = None
    """The shape is [tokens, k]."""

    @property
    def nbytes(self) -> int:
        """Return the size of the tokens and of the columns with them."""
        columns = (
            self.logprobs,
            self.trained,
            self.values,
            self.reference_logprobs,
            self.teacher_logprobs,
            self.teacher_top_token_ids,
            self.teacher_top_logprobs,
        )
        own = self.token_ids.nbytes + sum(column.nbytes for column in columns if column is not None)
        return own if self.episode is None else own + self.episode.nbytes

    @property
    def drop_reason(self) -> DropReason | None:
        """Return why the sample cannot be trained, where its rewards failed."""
        if self.outcome is None or self.outcome.total is not None:
            return None
        if self.played is not None and self.played.total is None:
            return DropReason.ENVIRONMENT_TIMEOUT if self.played.timed_out else DropReason.ENVIRONMENT_ERROR
        if self.outcome.unverifiable:
            return DropReason.UNVERIFIABLE
        return DropReason.REWARD_TIMEOUT if self.outcome.timed_out else DropReason.REWARD_ERROR

    def take_outcome(self, outcome: Outcome) -> None:
        """Take the result of the rewards; where that of the greedy response failed, this sample fails as well."""
        if self.played is not None:
            outcome = outcome.beside(self.played)
        self.outcome, self.verdicts = outcome, outcome.verdicts
        if outcome.total is not None:
            self.reward, self.reward_terms = outcome.total, outcome.terms
        if self.greedy is not None:
            self.compare_with_greedy(self.greedy)

    def compare_with_greedy(self, greedy: Outcome) -> None:
        """Take the reward of the greedy response to the same prompt, before this one is scored or after it."""
        self.greedy, self.greedy_reward = greedy, greedy.total
        if greedy.total is None and self.outcome is not None and self.outcome.total is not None:
            failure = f"the greedy response to its prompt: {greedy.failure}"
            self.outcome = replace(greedy, failure=failure)
            # Its own response made no verifier fail, so the verdict is never UNVERIFIABLE.
            said = Said.TIMEOUT if greedy.timed_out else Said.ERROR
            of = next((one.reward for one in greedy.verdicts if one.value is None), "")
            self.verdicts = (*self.verdicts, TermVerdict(of, said, message=failure))

    def steps_old(self, version: Version) -> int:
        """Return the age in steps; a sample of an earlier lineage is as old as the step that it was drawn for."""
        oldest = self.oldest_version
        return 0 if oldest is None else version.step - oldest.step


@dataclass
class RolloutGroup:
    """The samples of one prompt."""

    group_id: str
    prompt_text: str
    prompt_token_ids: np.ndarray
    samples: list[RolloutSample]
    span: SpanContext | None = None
    data_set: str = ""
    """The data set of its prompt, where the run has several."""
    teacher: str = ""
    """The role of the teacher that scores its samples, where its prompt names one."""
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """The other columns of its prompt's row."""
    chat: Messages = field(default_factory=list)
    """The messages of its prompt, where it is a chat."""
    answer_column: dict[str, Any] = field(default_factory=dict)
    """The answer as the row has it, under the name of its column."""

    @property
    def nbytes(self) -> int:
        """Return the size of the tokens and of the columns with them."""
        return self.prompt_token_ids.nbytes + sum(sample.nbytes for sample in self.samples)

    @property
    def uniform(self) -> bool:
        """Return whether all rewards are equal, so that the samples cannot be compared with each other."""
        return len({sample.reward for sample in self.samples}) == 1


@dataclass
class Batch:
    """The groups that one update trains on."""

    step: int
    groups: list[RolloutGroup]
    cursor: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    unscored: str = ""
    """The reason why some samples have no reward, with the user's code that raised first; empty where all have one."""

    @property
    def samples(self) -> list[RolloutSample]:
        """Return all samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]


class BatchSource(Protocol):
    """Makes the batches of a run: rollouts of the policy, or given answers."""

    samples_from_policy: bool
    """True where every step needs the newest weights in the generators."""

    async def restore(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Begin after `steps_done` steps, at `cursor` in the data set; recorded samples of later steps are reused."""

    def reconfigure(self, config: RunConfig) -> None:
        """Use other settings from the next admission on."""

    def admit(self, step: int, version: Version) -> None:
        """Begin the work of all steps up to `step` plus the allowed staleness."""

    async def batch(self, step: int, version: Version) -> Batch:
        """Return the whole batch of `step`, for training on `version`."""

    async def close(self) -> None:
        """Cancel what is under way."""


def batch_metrics(batch: Batch, version: Version) -> dict[str, float]:
    """Return the metrics of rewards, lengths, staleness, and the share of each generator."""
    samples = batch.samples
    if not samples:
        return {}
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(sample.token_ids) for sample in samples])
    oldest = [sample.oldest_version for sample in samples]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/uniform_groups": _uniform_share(batch.groups),
        "tokens/response_mean": float(lengths.mean()),
        "tokens/response_total": float(lengths.sum()),
        "tokens/truncated_rate": float(np.mean([sample.truncated for sample in samples])),
    }
    # Nobody knows how old recorded samples are: the versions of another run are none of this one.
    if ages := [version.step - one.step for one in oldest if one is not None]:
        metrics |= {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}
    means = part_means(sample.verdicts for sample in samples)
    metrics |= {f"reward/part/{name}": mean for name, mean in means.items()}
    greedy = [group.samples[0].greedy_reward for group in batch.groups]
    if known := [reward for reward in greedy if reward is not None]:
        metrics["reward/greedy_mean"] = float(np.mean(known))
    for name in sorted({group.data_set for group in batch.groups} - {""}):
        own = [group for group in batch.groups if group.data_set == name]
        metrics[f"reward/mean/{name}"] = float(np.mean([s.reward for group in own for s in group.samples]))
        metrics[f"reward/uniform_groups/{name}"] = _uniform_share(own)
        metrics[f"data/share/{name}"] = len(own) / len(batch.groups)
    for generator, count in Counter(sample.generator for sample in samples if sample.generator).items():
        metrics[f"generator/{generator}/samples"] = float(count)
    return metrics


def _uniform_share(groups: list[RolloutGroup]) -> float:
    return float(np.mean([group.uniform for group in groups]))


def given_group(run_id: str, prompt: Prompt) -> RolloutGroup:
    """Return a prompt with its given answers, in their order, as the samples that the trainer gets."""
    group_id = ids.group_id(run_id, prompt.epoch, prompt.index)
    samples = [
        RolloutSample(
            sample_id=ids.sample_id(group_id, place),
            token_ids=answer.token_ids,
            logprobs=None,
            text=answer.text,
            trained=answer.trained,
        )
        for place, answer in enumerate(prompt.given)
    ]
    return RolloutGroup(
        group_id, prompt.prompt_text, prompt.token_ids, samples, answer=prompt.answer, info=prompt.info
    )


def recorded_group(run_id: str, prompt: Prompt) -> RolloutGroup:
    """Return a prompt with its recorded samples, in their order, as the samples that the trainer gets.

    They have no version of this run: the trainer takes none of their tokens as written by the policy that it trains.
    """
    group_id = ids.group_id(run_id, prompt.epoch, prompt.index)
    samples = [
        RolloutSample(
            sample_id=ids.sample_id(group_id, place),
            token_ids=one.token_ids,
            logprobs=one.logprobs,
            text=one.text,
            truncated=one.truncated,
            reward=one.reward,
            reward_terms=one.reward_terms,
            greedy_reward=one.greedy_reward,
            trained=one.trained,
            episode=_recorded_episode(one),
        )
        for place, one in enumerate(prompt.recorded)
    ]
    return RolloutGroup(
        group_id,
        prompt.prompt_text,
        prompt.token_ids,
        samples,
        data_set=prompt.data_set,
        answer=prompt.answer,
        info=prompt.info,
        chat=prompt.chat,
        answer_column=prompt.answer_column,
    )


def _recorded_episode(one: RecordedSample) -> Episode | None:
    if not one.ending:
        return None
    return Episode(
        one.ending,
        one.turns,
        one.turn_rewards,
        one.messages,
        tuple(Branch(branch.start, branch.prompt_token_ids) for branch in one.branches),
        one.turn_ends,
        one.turn_states,
    )
