"""Scores the items of one call.

Invariants: every item ends in exactly one outcome, under its own sample id; where a judge is away, the items that need
it have none, and the call fails when all others have one. Terms that score a response by itself run
first, then those that compare the responses of a group, both in the order of the spec, and the first one that fails or
times out decides. What has failed is not among the responses that are compared. A value is finite or it is an error.
The caller weighs the values of the terms. When it goes away, the work stops. While it waits, it gets an outcome or a
sign of life every `SIGN_OF_LIFE_S`, for as long as the event loop of this process runs. Every task is yielded once; a
caller that leaves early ends those that still run.

A response is unverifiable where the verifier says so, and where a verifier that blames responses passes its limit with
it or dies twice. What ends a worker once, or this service, is never blamed on a response.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import LARGEST_REWARD
from flotilla_core.errors import InvalidConfig, InvalidRequest, Unavailable
from flotilla_core.structs import to_json
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.tensors import from_tensor
from flotilla_reward import catalog
from flotilla_reward.answers import Answer, Outcome, Value, Workers
from flotilla_reward.builtin import BuiltinReward, CannotScore, Sample, Unverifiable
from flotilla_reward.catalog import Term
from flotilla_reward.judges.judge import Judge, Judges
from flotilla_reward.verifiers.verification import JAIL, OF_JAIL, STARTS_S
from flotilla_reward.worker import Facts
from flotilla_workers.process import Failure, Timeout

MOST_TOGETHER = 64
"""Built-in rewards hold the loop: no other caller waits for more of them than this."""

T = TypeVar("T")

SIGN_OF_LIFE_S = 5.0
"""A caller takes a replica for dead that is silent for several times as long."""

DEATH = re.compile(r"the worker .* while it answered|its process .* before it answered", re.DOTALL)
"""The beginning of what is told of a worker, or of its process for one answer, that died during a question."""
PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d{1,7}) in [^:]+: (?P<message>.*)", re.DOTALL)
"""The form in which an exception is told: the user's line that it came from, and what it says."""


@dataclass(frozen=True)
class Run:
    """The run that a call is made for."""

    run_id: str = ""
    total_steps: int | None = None


NO_RUN = Run()


def resolve(
    specs: Sequence[pb.RewardSpec], code: Mapping[str, Path] | None = None, judges: Judges | None = None
) -> list[Term]:
    """Return the terms of a call; `code` says where the files of functions are on this host."""
    if not specs:
        raise InvalidRequest("the request has no rewards", next_step="Add a term to the run.")
    return [catalog.resolve(spec, (code or {}).get(spec.reward), judges) for spec in specs]


async def load(terms: Sequence[Term], pool: Workers, run_id: str = "") -> AsyncGenerator[pb.ScoreResponse]:
    """Has a worker load each term that needs one, once, and checks judges; the responses are signs of life."""
    for term in terms:
        if term.runs_code and pool.jail.refusal:
            raise InvalidConfig(f"reward {term.name} cannot run code", why=pool.jail.refusal)
        if term.judge is not None:
            checking = asyncio.create_task(term.judge.check())
            async with aclosing(_signs_until(checking)) as signs:
                async for sign in signs:
                    yield sign
            checking.result()
        if term.target is None:
            continue
        loading = asyncio.create_task(pool.prove(term.target, run_id))
        async with aclosing(_signs_until(loading)) as signs:
            async for sign in signs:
                yield sign
        if failure := loading.result():
            raise InvalidConfig(
                f"reward {term.name} cannot be loaded",
                where=term.target.source,
                why=failure.message + (f"\n{failure.traceback}" if failure.traceback else ""),
            )


async def _signs_until(task: asyncio.Task[Any]) -> AsyncGenerator[pb.ScoreResponse]:
    """Yield signs of life until a task has ended."""
    async with aclosing(endings([task])) as moments:
        async for ended in moments:
            if not ended:
                yield pb.ScoreResponse()


def facts_of(terms: Sequence[Term], pool: Workers) -> pb.ScoreResponse:
    """Return what the loaded terms take."""
    found = [pool.facts(term) for term in terms]
    facts = [pb.TermFacts(whole_groups=one.whole_groups, token_ids=one.token_ids) for one in found]
    return pb.ScoreResponse(terms=facts)


async def score_items(
    items: Sequence[pb.ScoreItem], terms: Sequence[Term], pool: Workers, run: Run = NO_RUN
) -> AsyncGenerator[pb.ScoreResponse]:
    """One outcome an item, in the order in which they end; a response without any is a sign of life."""
    _check_ids(items)
    scoring = _Scoring(terms, pool, run)
    if all(term.builtin is not None for term in terms):
        for first in range(0, len(items), MOST_TOGETHER):
            outcomes = [(await scoring.outcomes([item]))[0] for item in items[first : first + MOST_TOGETHER]]
            yield pb.ScoreResponse(outcomes=outcomes)
        return
    groups = _groups(items) if scoring.compares else [[item] for item in items]
    tasks = [asyncio.create_task(_score_or_wait(scoring, group)) for group in groups]
    away: Unavailable | None = None
    async with aclosing(endings(tasks)) as moments:
        async for ended in moments:
            found = [task.result() for task in ended]
            away = next((one for one in found if isinstance(one, Unavailable)), away)
            scored = [one for one in found if not isinstance(one, Unavailable)]
            yield pb.ScoreResponse(outcomes=[outcome for group in scored for outcome in group])
    if away is not None:
        raise away


async def _score_or_wait(
    scoring: _Scoring, group: Sequence[pb.ScoreItem]
) -> list[pb.ScoreOutcome] | Unavailable:
    """Return the outcomes of a group, or why a judge that it needs is away."""
    try:
        return await scoring.outcomes(group)
    except Unavailable as error:
        return error


def _groups(items: Sequence[pb.ScoreItem]) -> list[list[pb.ScoreItem]]:
    groups: dict[str, list[pb.ScoreItem]] = {}
    for item in items:
        # No name of a group is that of a sample and a line end.
        groups.setdefault(item.group or f"{item.sample_id}\n", []).append(item)
    return [*groups.values()]


def _check_ids(items: Sequence[pb.ScoreItem]) -> None:
    seen: set[str] = set()
    for item in items:
        if not item.sample_id:
            raise InvalidRequest("an item has no sample_id")
        if item.sample_id in seen:
            raise InvalidRequest(f"sample_id {item.sample_id} is twice in the request")
        seen.add(item.sample_id)


class _Response:
    """One response on its way through the terms."""

    def __init__(self, item: pb.ScoreItem) -> None:
        self.item = item
        self.failed = False
        self.left_out = False
        """The caller drops it, so no other response is compared with it."""
        self._components: dict[int, pb.RewardComponent] = {}
        self._outcome = pb.ScoreOutcome(sample_id=item.sample_id)
        self._spent_s = 0.0

    def take(self, place: int, term: Term, facts: Facts, outcome: Outcome, elapsed_s: float) -> None:
        """Take what a term says; a failure is the last thing that is taken."""
        version = term.version or facts.version
        self._spent_s += elapsed_s
        if isinstance(outcome, Value) and abs(outcome.value) > LARGEST_REWARD:
            outcome = Failure(f"returned {outcome.value:g}, expected at most {LARGEST_REWARD:g} either way")
        if isinstance(outcome, Value):
            self.left_out |= term.drops_unverifiable and outcome.unverifiable is not None
            self._components[place] = pb.RewardComponent(
                reward=term.name,
                value=outcome.value,
                unreadable=outcome.unverifiable is not None,
                why=outcome.unverifiable or outcome.why,
                parts=[pb.NamedPart(name=name, value=part) for name, part in outcome.parts.items()],
                extracted=outcome.extracted,
                version=version,
                elapsed=_duration(elapsed_s),
            )
            return
        self.failed = True
        if isinstance(outcome, Timeout):
            late = pb.RewardTimeout(
                reward=term.name,
                limit=_duration(outcome.limit_s),
                version=version,
                file=facts.file,
                line=facts.line,
            )
            self._outcome.timeout.CopyFrom(late)
            return
        place_of = PLACE.fullmatch(outcome.message)
        error = pb.RewardError(
            reward=term.name,
            message=f"reward {term.name}: {outcome.message}",
            traceback=outcome.traceback,
            file=place_of["file"] if place_of else facts.file,
            line=int(place_of["line"]) if place_of else facts.line,
            version=version,
            elapsed=_duration(elapsed_s),
        )
        self._outcome.error.CopyFrom(error)

    def outcome(self) -> pb.ScoreOutcome:
        """Return the outcome, with what the terms said in their order."""
        said = [component for _, component in sorted(self._components.items(), key=lambda one: one[0])]
        self._outcome.elapsed.CopyFrom(_duration(self._spent_s))
        if self.failed:
            self._outcome.before.extend(said)
        else:
            self._outcome.value.components.extend(said)
        return self._outcome


class _Scoring:
    """The terms of a call, as they score its responses."""

    def __init__(self, terms: Sequence[Term], pool: Workers, run: Run) -> None:
        self._pool = pool
        self._run = run
        self._facts = [pool.facts(term) for term in terms]
        whole = [facts.whole_groups for facts in self._facts]
        self._alone = [(place, term) for place, term in enumerate(terms) if not whole[place]]
        self._comparing = [(place, term) for place, term in enumerate(terms) if whole[place]]

    @property
    def compares(self) -> bool:
        """Return whether a term compares responses with each other."""
        return bool(self._comparing)

    async def outcomes(self, items: Sequence[pb.ScoreItem]) -> list[pb.ScoreOutcome]:
        """Return the outcome of each response of a group."""
        responses = [_Response(item) for item in items]
        if len(responses) == 1:
            await self._score_alone(responses[0])
        else:
            await gather_or_cancel(map(self._score_alone, responses))
        if self._comparing:
            await self._compare(responses)
        return [response.outcome() for response in responses]

    async def _score_alone(self, response: _Response) -> None:
        """Score a response by itself."""
        for place, term in self._alone:
            if term.builtin is not None:
                outcome, elapsed_s = _now(term.builtin, response.item)
            elif term.judge is not None:
                outcome, elapsed_s = await _judged(term.judge, response.item)
            else:
                answers, elapsed_s = await self._ask(place, term, [response.item])
                (outcome,) = answers
            response.take(place, term, self._facts[place], outcome, elapsed_s)
            if response.failed:
                return

    async def _compare(self, responses: Sequence[_Response]) -> None:
        """Compare the responses that count; where one fails now, the others are compared without it."""
        whole = False
        while not whole and (left := [one for one in responses if not (one.failed or one.left_out)]):
            for place, term in self._comparing:
                answers, elapsed_s = await self._ask(place, term, [one.item for one in left])
                for one, answer in zip(left, answers, strict=True):
                    one.take(place, term, self._facts[place], answer, elapsed_s / len(left))
                if not (whole := not any(one.failed for one in left)):
                    break

    async def _ask(
        self, place: int, term: Term, items: Sequence[pb.ScoreItem]
    ) -> tuple[Sequence[Outcome], float]:
        """Return what a worker says of each response, and the seconds that it took."""
        assert term.target is not None
        question = self._question(term, items, self._facts[place])
        limit_s = term.timeout_s * len(items) + (STARTS_S if term.runs_code else 0)
        ask = partial(self._pool.ask, term.target, question, limit_s, self._run.run_id, alone=term.runs_code)
        said, elapsed_s = await ask()
        blamed = term.blames_response and len(items) == 1
        if blamed and _is_death(said) and not self._pool.stopping:
            # Whatever ended the worker did so by chance, if the response does not end another one.
            said, more_s = await ask()
            elapsed_s += more_s
        if blamed and not self._pool.stopping:
            said = _blamed(term, said)
        if isinstance(said, tuple) and len(said) == len(items):
            return said, elapsed_s
        if isinstance(said, tuple):
            said = Failure(f"its worker told {len(said)} scores of {len(items)} responses")
        return [said] * len(items), elapsed_s

    def _question(self, term: Term, items: Sequence[pb.ScoreItem], facts: Facts) -> dict[str, Any]:
        first = items[0]
        question: dict[str, Any] = {
            "prompt": first.prompt,
            "responses": [item.response for item in items],
            "answer": first.answer,
            "info": to_json(first.info),
        }
        if term.runs_code:
            jail = JAIL.dump_python(self._pool.jail, mode="json", include=OF_JAIL)
            question["means"] = {"jail": jail, "limit_s": term.timeout_s}
        if not term.is_builtin:
            question["chat"] = [{"role": one.role, "content": one.content} for one in first.chat]
            question["answer_column"] = to_json(first.answer_column)
            if facts.token_ids and all(item.HasField("token_ids") for item in items):
                question["token_ids"] = [from_tensor(item.token_ids).tolist() for item in items]
            if first.HasField("step") and self._run.total_steps is not None:
                question |= {"step": first.step, "total_steps": self._run.total_steps}
        return question


def _now(builtin: BuiltinReward, item: pb.ScoreItem) -> tuple[Outcome, float]:
    """Score a response in this process."""
    started = time.perf_counter()
    sample = Sample(item.prompt, item.response, item.answer, to_json(item.info))
    outcome: Outcome
    try:
        outcome = Value.of(builtin.score(sample))
    except CannotScore as error:
        outcome = Failure(str(error))
    except Unverifiable as error:
        outcome = Value(0.0, unverifiable=str(error))
    return outcome, time.perf_counter() - started


async def _judged(judge: Judge, item: pb.ScoreItem) -> tuple[Outcome, float]:
    """Ask a judge of a response."""
    started = time.perf_counter()
    outcome: Outcome
    try:
        outcome = Value.of(await judge.judged(item))
    except CannotScore as error:
        outcome = Failure(str(error))
    return outcome, time.perf_counter() - started


def _is_death(said: Answer | Failure | Timeout) -> bool:
    return isinstance(said, Failure) and DEATH.match(said.message) is not None


def _blamed(term: Term, said: Answer | Failure | Timeout) -> Answer | Failure | Timeout:
    """Return what is said of a response to a verifier that blames it for its limit and its death."""
    if isinstance(said, Timeout):
        return Value(0.0, unverifiable=f"it kept {term.name} busy until the limit of {said.limit_s:g} s")
    if isinstance(said, Failure) and _is_death(said):
        return Value(0.0, unverifiable=f"{said.message}, twice")
    return said


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


async def endings(tasks: Sequence[asyncio.Task[T]]) -> AsyncGenerator[list[asyncio.Task[T]]]:
    """Yield the tasks that ended since the last time, together; an empty list is a sign of life."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[asyncio.Task[T] | None] = asyncio.Queue()
    timer: asyncio.TimerHandle

    # One timer for all tasks: it costs nothing where they end fast.
    def sign() -> None:
        nonlocal timer
        ended.put_nowait(None)
        timer = loop.call_later(SIGN_OF_LIFE_S, sign)

    timer = loop.call_later(SIGN_OF_LIFE_S, sign)
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    left = len(tasks)
    try:
        while left:
            together = [await ended.get()]
            while not ended.empty():
                together.append(ended.get_nowait())
            new = [task for task in together if task is not None]
            left -= len(new)
            yield new
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
