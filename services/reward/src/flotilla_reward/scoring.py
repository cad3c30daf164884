"""Scores the items of one call.

Invariants: every item ends in exactly one outcome, under its own sample id; terms run in the order of the spec and
the first one that fails or times out decides; a value is finite or it is an error. The caller weighs the values of the
terms. When it goes away, the work stops. While it waits, it gets an outcome or a sign of life every `SIGN_OF_LIFE_S`,
for as long as the event loop of this process runs. Every task is yielded once; a caller that leaves early ends those
that still run. Where a judge is away, its items have no outcome: the call fails when all others have one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import LARGEST_REWARD
from flotilla_core.errors import InvalidConfig, InvalidRequest, Unavailable, unicode_text
from flotilla_core.structs import to_json
from flotilla_reward import catalog
from flotilla_reward.builtin import CannotScore, Sample, Unreadable
from flotilla_reward.catalog import Term
from flotilla_reward.judges.judge import Judges
from flotilla_reward.worker import LONGEST_NAME, MOST_PARTS
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import Jail
from flotilla_workers.pool import WorkerPool
from flotilla_workers.process import Failure, Timeout

MOST_TOGETHER = 64
"""Built-in rewards hold the loop: no other caller waits for more of them than this."""

T = TypeVar("T")

SIGN_OF_LIFE_S = 5.0
"""A caller takes a replica for dead that is silent for several times as long."""


@dataclass(frozen=True)
class Value:
    """A finite number."""

    value: float
    unreadable: bool = False
    """The response broke a built-in checker or kept it busy until the limit, and is worth 0 for that."""
    parts: dict[str, float] = field(default_factory=dict)
    """The finite numbers that a function returned beside it."""


Outcome = Value | Failure | Timeout
"""A failure or a timeout carries no number that could be mistaken for a score."""
Workers = WorkerPool[Value]


def workers(count: int, find_jail: Callable[[], Jail]) -> Workers:
    """Return a pool whose workers score samples, by functions of users in a jail."""
    return WorkerPool(count, "flotilla_reward.worker:load", _value, find_jail)


def _value(target: Target, said: Any) -> Value:
    # No code of a user's says of its own responses what built-in rewards say.
    if said is None and target.kind == "builtin":
        return Value(0.0, unreadable=True)
    value, parts = said if isinstance(said, list) and len(said) == 2 else (said, {})
    if not _is_finite(value):
        raise NoAnswer("it is no finite number")
    if not isinstance(parts, dict) or len(parts) > MOST_PARTS or not all(map(_is_finite, parts.values())):
        raise NoAnswer("its parts are no finite numbers with names")
    return Value(value, parts={unicode_text(name[:LONGEST_NAME]): part for name, part in parts.items()})


def _is_finite(said: object) -> bool:
    return isinstance(said, float) and math.isfinite(said)


def resolve(
    specs: Sequence[pb.RewardSpec], code: Mapping[str, Path] | None = None, judges: Judges | None = None
) -> list[Term]:
    """Return the terms of a call; `code` says where the files of functions are on this host."""
    if not specs:
        raise InvalidRequest("the request has no rewards", next_step="Add a term to the run.")
    return [catalog.resolve(spec, (code or {}).get(spec.reward), judges) for spec in specs]


async def load(terms: Sequence[Term], pool: Workers, run_id: str = "") -> AsyncGenerator[pb.ScoreResponse]:
    """Has a worker load each term that needs one, once; the responses are signs of life."""
    for term in terms:
        if term.judge is not None:
            term.judge.check()
        if term.target is None:
            continue
        loading = asyncio.create_task(pool.prove(term.target, run_id))
        async with aclosing(endings([loading])) as moments:
            async for ended in moments:
                if not ended:
                    yield pb.ScoreResponse()
        if failure := loading.result():
            raise InvalidConfig(
                f"reward {term.name} cannot be loaded",
                where=term.target.source,
                why=failure.message + (f"\n{failure.traceback}" if failure.traceback else ""),
            )


async def score_items(
    items: Sequence[pb.ScoreItem], terms: Sequence[Term], pool: Workers, run_id: str = ""
) -> AsyncGenerator[pb.ScoreResponse]:
    """One outcome an item, in the order in which they end; a response without any is a sign of life."""
    _check_ids(items)
    if all(term.builtin is not None for term in terms):
        for first in range(0, len(items), MOST_TOGETHER):
            outcomes = [
                await _score(item, terms, pool, run_id) for item in items[first : first + MOST_TOGETHER]
            ]
            yield pb.ScoreResponse(outcomes=outcomes)
        return
    tasks = [asyncio.create_task(_score_or_wait(item, terms, pool, run_id)) for item in items]
    away: Unavailable | None = None
    async with aclosing(endings(tasks)) as moments:
        async for ended in moments:
            found = [task.result() for task in ended]
            away = next((one for one in found if isinstance(one, Unavailable)), away)
            yield pb.ScoreResponse(outcomes=[one for one in found if isinstance(one, pb.ScoreOutcome)])
    if away is not None:
        raise away


def _check_ids(items: Sequence[pb.ScoreItem]) -> None:
    seen: set[str] = set()
    for item in items:
        if not item.sample_id:
            raise InvalidRequest("an item has no sample_id")
        if item.sample_id in seen:
            raise InvalidRequest(f"sample_id {item.sample_id} is twice in the request")
        seen.add(item.sample_id)


async def _score_or_wait(
    item: pb.ScoreItem, terms: Sequence[Term], pool: Workers, run_id: str
) -> pb.ScoreOutcome | Unavailable:
    """Return the outcome of an item, or why a judge that it needs is away."""
    try:
        return await _score(item, terms, pool, run_id)
    except Unavailable as error:
        return error


async def _score(item: pb.ScoreItem, terms: Sequence[Term], pool: Workers, run_id: str) -> pb.ScoreOutcome:
    sample = Sample(item.prompt, item.response, item.answer, to_json(item.info))
    value = pb.RewardValue()
    spent_s = 0.0
    for term in terms:
        outcome, elapsed_s = await _run(term, item, sample, pool, run_id)
        spent_s += elapsed_s
        if isinstance(outcome, Value) and abs(outcome.value) > LARGEST_REWARD:
            outcome = Failure(f"returned {outcome.value:g}, expected at most {LARGEST_REWARD:g} either way")
        if not isinstance(outcome, Value):
            return _unscored(item.sample_id, term, outcome, spent_s)
        parts = [pb.NamedPart(name=name, value=part) for name, part in outcome.parts.items()]
        value.components.add(
            reward=term.name, value=outcome.value, unreadable=outcome.unreadable, parts=parts
        )
    return pb.ScoreOutcome(sample_id=item.sample_id, value=value, elapsed=_duration(spent_s))


async def _run(
    term: Term, item: pb.ScoreItem, sample: Sample, pool: Workers, run_id: str
) -> tuple[Outcome, float]:
    outcome: Outcome
    if term.target is not None:
        question = sample._asdict()
        if term.target.kind != "builtin":
            question["chat"] = [{"role": one.role, "content": one.content} for one in item.chat]
            question["answer_column"] = to_json(item.answer_column)
        outcome, elapsed_s = await pool.ask(term.target, question, term.timeout_s, run_id)
        if isinstance(outcome, Timeout) and term.blames_response:
            return Value(0.0, unreadable=True), elapsed_s
        return outcome, elapsed_s
    started = asyncio.get_running_loop().time()
    try:
        if term.judge is not None:
            judged = await term.judge.judged(item)
            outcome = Value(judged.value, parts=judged.parts)
        else:
            assert term.builtin is not None
            outcome = Value(term.builtin.score(sample))
    except CannotScore as error:
        outcome = Failure(str(error))
    except Unreadable:
        outcome = Value(0.0, unreadable=True)
    return outcome, asyncio.get_running_loop().time() - started


def _unscored(sample_id: str, term: Term, outcome: Failure | Timeout, spent_s: float) -> pb.ScoreOutcome:
    unscored = pb.ScoreOutcome(sample_id=sample_id, elapsed=_duration(spent_s))
    if isinstance(outcome, Timeout):
        unscored.timeout.CopyFrom(pb.RewardTimeout(reward=term.name, limit=_duration(outcome.limit_s)))
    else:
        message = f"reward {term.name}: {outcome.message}"
        error = pb.RewardError(reward=term.name, message=message, traceback=outcome.traceback)
        unscored.error.CopyFrom(error)
    return unscored


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
