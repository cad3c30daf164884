"""Scores finished samples by reward models: text in, the number after the last token out.

Invariants: a model reads text by its own tokenizer, and by its own chat template or the template of the term; token ids
of the policy never reach it. Text that it cannot read is a failure of the sample with the name of the term, and no
score; text that is cut loses its beginning and is counted. A gang that does not answer fails the call, so that the run
waits for the gang: no sample gets a reward by it, and none is lost. Terms that ask a model about the same text share
its answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from google.protobuf.duration_pb2 import Duration
from opentelemetry.trace import SpanContext

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.rollouts.scoring import (
    Needs,
    ScoreGathering,
    Take,
    TermScorer,
    by_name,
    said_of,
)
from flotilla_core import telemetry
from flotilla_core.config import RewardModelChoice, RewardTermConfig
from flotilla_core.config.rewards import PROMPT, RESPONSE
from flotilla_core.errors import InvalidConfig
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.telemetry import names
from flotilla_data.chat_template import Conversation
from flotilla_data.tokenizer import Tokenizer

_PLACE = re.compile(f"{re.escape(PROMPT)}|{re.escape(RESPONSE)}")


class ScoringGang(Protocol):
    """The gang of a reward model."""

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a text; 0 where there is no limit."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model has; 0 where it is not known."""

    async def scores(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the scores after the last token of each text, one for each label."""


class RewardModel:
    """A reward model of a run, with its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, gang: ScoringGang, version: str = "") -> None:
        self.version = version
        """The folder or hub name that its weights are from."""
        self._tokenizer = tokenizer
        self._gang = gang
        self._cut = 0

    def take_cut(self) -> float:
        """Count the texts that were cut since the last call."""
        cut, self._cut = self._cut, 0
        return float(cut)

    async def answers(self, template: str, items: Sequence[pb.ScoreItem], *, cuts: bool) -> list[Answer]:
        """Return the answer about each item; `cuts` says what becomes of text that is too long."""
        texts = await asyncio.to_thread(tokens_of, self._tokenizer, template, items)
        limit, vocabulary = self._gang.longest_sequence, self._gang.vocabulary
        refused = {
            place: why
            for place, text in enumerate(texts)
            if (why := _refusal(text, limit, vocabulary, cuts=cuts))
        }
        whole = [
            text for place, text in enumerate(texts) if place not in refused and not isinstance(text, str)
        ]
        read = [np.array(text[-limit:], np.int32) for text in whole]
        scores = iter(await self._gang.scores(read) if read else ())
        answers = [
            Answer(None, refused[place])
            if place in refused
            else Answer(next(scores), cut=bool(limit) and len(text) > limit)
            for place, text in enumerate(texts)
        ]
        self._cut += sum(answer.cut for answer in answers)
        return answers


class Answer(NamedTuple):
    """The answer of a reward model about one text."""

    scores: np.ndarray | None
    failure: str = ""
    cut: bool = False


def tokens_of(tokenizer: Tokenizer, template: str, items: Sequence[pb.ScoreItem]) -> list[list[int] | str]:
    """Return the tokens that a model reads of each item, or why there are none."""
    if template:
        filled = [_filled(template, item) for item in items]
        # The prompt of a chat was rendered, and has its special tokens.
        bare = [not item.chat for item in items]
        encoded = {
            special: iter(
                tokenizer.encode_many(
                    [text for text, own in zip(filled, bare, strict=True) if own is special], special=special
                )
            )
            for special in (True, False)
        }
        return [next(encoded[special]) for special in bare]
    rendered = tokenizer.render_chats([_conversation(item) for item in items])
    # A rendered template has its own special tokens.
    whole = iter(tokenizer.encode_many([text for text in rendered if isinstance(text, str)]))
    return [str(text) if isinstance(text, InvalidConfig) else next(whole) for text in rendered]


def _filled(template: str, item: pb.ScoreItem) -> str:
    return _PLACE.sub(lambda place: item.prompt if place[0] == PROMPT else item.response, template)


def _conversation(item: pb.ScoreItem) -> Conversation:
    """Return the messages of the prompt, or a prompt of text as the user's, with the response as the assistant's."""
    said = [(one.role, one.content) for one in item.chat] or [("user", item.prompt)]
    messages = [{"role": role, "content": text} for role, text in (*said, ("assistant", item.response))]
    return Conversation(messages, begin_answer=False, where=f"sample {item.sample_id}")


def _refusal(text: list[int] | str, limit: int, vocabulary: int, *, cuts: bool) -> str:
    if isinstance(text, str):
        return text
    if not text:
        return "there is no text to judge"
    if limit and len(text) > limit and not cuts:
        return f"the text has {len(text)} tokens, and the model reads {limit} (too_long: cut leaves its beginning out)"
    if vocabulary and (most := max(text)) >= vocabulary:
        return f"its tokenizer gives token id {most}, and the model has ids 0 to {vocabulary - 1}"
    return ""


class Question(NamedTuple):
    """A question of a term to a reward model."""

    model: str
    template: str
    cuts: bool

    @classmethod
    def of(cls, term: RewardTermConfig) -> Question:
        """Return the question of a term."""
        choice: RewardModelChoice | None = term.model
        assert choice is not None, "other terms are of the reward service"
        return cls(choice.model, term.template, term.too_long == "cut")


class RewardModelScorer:
    """Asks the reward models of one run, in calls that groups share."""

    def __init__(
        self, run_id: str, terms: tuple[RewardTermConfig, ...], models: Mapping[str, RewardModel]
    ) -> None:
        self.terms = terms
        self._run_id = run_id
        self._models = models
        self._gathering: ScoreGathering[pb.ScoreOutcome] = ScoreGathering(self._scored)

    async def needs(self) -> Needs:
        """Return that a model reads one text at a time, by its own tokenizer."""
        return Needs()

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        """Return one outcome for every item."""
        return await self._gathering.outcomes(items)

    async def _scored(
        self, items: list[pb.ScoreItem], askers: list[SpanContext], take: Take[pb.ScoreOutcome]
    ) -> None:
        asked = [*dict.fromkeys(map(Question.of, self.terms))]
        attributes: dict[str, str | int] = {names.RUN_ID: self._run_id, names.SAMPLES: len(items)}
        began = time.perf_counter()
        with telemetry.span(names.RL_REWARD, attributes=attributes, links=askers):
            found = await gather_or_cancel(
                self._models[one.model].answers(one.template, items, cuts=one.cuts) for one in asked
            )
        answers = dict(zip(asked, found, strict=True))
        share = Duration()
        share.FromNanoseconds(int((time.perf_counter() - began) * 1e9 / len(items)))
        for place, item in enumerate(items):
            own = [(term, answers[Question.of(term)][place]) for term in self.terms]
            take(item.sample_id, self._outcome(item.sample_id, own, share))

    def _outcome(
        self, sample_id: str, answers: Sequence[tuple[RewardTermConfig, Answer]], elapsed: Duration
    ) -> pb.ScoreOutcome:
        """Return the values of all terms, or the first failure; terms share the time that a text took."""
        components: list[pb.RewardComponent] = []
        for term, answer in answers:
            value, why = _value(term, answer)
            version = self._models[Question.of(term).model].version
            if why:
                error = pb.RewardError(
                    reward=term.shown,
                    message=f"reward {term.shown}: {why}",
                    version=version,
                    elapsed=elapsed,
                )
                return pb.ScoreOutcome(sample_id=sample_id, error=error, before=components)
            components.append(
                pb.RewardComponent(
                    reward=term.shown,
                    value=value,
                    parts=[pb.NamedPart(name="cut", value=answer.cut)] if term.too_long == "cut" else [],
                    version=version,
                    elapsed=elapsed,
                )
            )
        return pb.ScoreOutcome(sample_id=sample_id, value=pb.RewardValue(components=components))


def _value(term: RewardTermConfig, answer: Answer) -> tuple[float, str]:
    """Return the score that a term takes, or why there is none."""
    if answer.scores is None:
        return 0.0, answer.failure
    choice: RewardModelChoice | None = term.model
    label = None if choice is None else choice.label
    if label is None and len(answer.scores) == 1:
        label = 0
    if label is None or label >= len(answer.scores):
        return 0.0, f"the model gives {len(answer.scores)} scores, and label is {label}"
    value = float(answer.scores[label])
    return value, "" if np.isfinite(value) else f"the score is {value}"


class TermsInOrder:
    """Gives the values of two scorers' terms together, in the order of the configuration."""

    def __init__(
        self, terms: tuple[RewardTermConfig, ...], functions: TermScorer, models: TermScorer
    ) -> None:
        self.terms = terms
        self._functions = functions
        self._models = models

    async def needs(self) -> Needs:
        """Return what the functions take: models take nothing."""
        return await self._functions.needs()

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        """Return one outcome for every item; the first that failed decides."""
        if (await self.needs()).whole_groups:
            of_models = await self._models.outcomes(items)
            # Functions compare no response with one that a model refused.
            left = [item for item in items if not _failed(of_models[item.sample_id])]
            of_functions = await self._functions.outcomes(left)
        else:
            of_functions, of_models = await gather_or_cancel(
                one.outcomes(items) for one in (self._functions, self._models)
            )
        found = (of_functions, of_models)
        return {
            item.sample_id: self._joined([one[item.sample_id] for one in found if item.sample_id in one])
            for item in items
        }

    def _joined(self, outcomes: Sequence[pb.ScoreOutcome]) -> pb.ScoreOutcome:
        """Return what all terms say of one item, in their order."""
        said = [
            component for _, component in by_name(self.terms, chain.from_iterable(map(said_of, outcomes)))
        ]
        joined = pb.ScoreOutcome(sample_id=outcomes[0].sample_id)
        if (failed := next(filter(_failed, outcomes), None)) is None:
            joined.value.components.extend(said)
        else:
            joined.CopyFrom(failed)
            del joined.before[:]
            joined.before.extend(said)
        return joined


def _failed(outcome: pb.ScoreOutcome) -> bool:
    return outcome.WhichOneof("outcome") != "value"
