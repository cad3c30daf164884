"""Scores finished samples; groups that request scores at nearly the same time share one call.

Invariants: an outcome is a value, an error or a timeout, and only a value is ever a reward. A reward is weighed here
alone, whoever gives its terms, and is finite or an error. The loss of a reward replica is repaired by calling another
one, never by a score. A replica is lost when it is silent, never because it is slow: it reports regularly while samples
wait, and applies each sample's own limit. Samples whose judge has no generator wait for one, by its name.

A group waits only for a fixed short time for others, and never for the samples of another group. A sample id is in a
call once, and all items of a group are in one call. A call that fails fails for all groups that still wait, and a call
that no group waits for ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from opentelemetry import trace
from opentelemetry.trace import SpanContext

from flotilla.common.v1.chat_pb2 import Message
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.judges import FleetJudges, JudgeTally
from flotilla_core import ids, rpc, telemetry
from flotilla_core.config import LARGEST_REWARD, RewardMode, RewardTermConfig
from flotilla_core.config.model import file_of_function
from flotilla_core.errors import DeadlineExceeded, FlotillaError, Unavailable
from flotilla_core.rpc import Load, ReplicaPool
from flotilla_core.telemetry import names
from flotilla_core.tensors import to_tensor

if TYPE_CHECKING:
    import numpy as np

    from flotilla.common.v1.files_pb2 import FolderReference
    from flotilla.reward.v1.reward_pb2_grpc import RewardServiceAsyncStub

RIGHT_AT = 1.0
"""A prompt whose answers have at least this total is solved; evaluations have a threshold of their own."""
MAX_CALLS = 5
SILENT_S = 40.0
"""The time of several reports of a reward replica, and the time for which a connection may be silent."""

LOOK_EVERY_S = 5.0
"""The time for which the files of the user's are taken to be as they were."""

GATHER_S = 0.005
"""The wait for more samples: a call costs both sides about a millisecond, so many small calls cost more than it."""
GATHER_BUSY_S = 0.025
"""The wait while other calls are under way: the more samples end, the more of them share a call."""

T = TypeVar("T")
Take = Callable[[str, T], None]
Call = Callable[[list[pb.ScoreItem], list[SpanContext], Take[T]], Awaitable[None]]
"""Scores items on behalf of some spans, and passes on each outcome by its sample id as it arrives."""


class _Asked(Generic[T]):
    """One group that waits for its outcomes."""

    def __init__(self, items: list[pb.ScoreItem]) -> None:
        self.items = {item.sample_id: item for item in items}
        self.outcomes: dict[str, T] = {}
        self.done: asyncio.Future[dict[str, T]] = asyncio.get_running_loop().create_future()
        self.span = trace.get_current_span().get_span_context()

    def take(self, sample_id: str, outcome: T) -> None:
        """Take the outcome of one item; the last one ends the wait of the group."""
        self.outcomes[sample_id] = outcome
        if len(self.outcomes) == len(self.items) and not self.done.done():
            self.done.set_result(self.outcomes)


class ScoreGathering(Generic[T]):
    """Joins groups that request scores at nearly the same time into one call."""

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._waiting: list[_Asked[T]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, T]:
        """Return one outcome for every item."""
        if not items:
            return {}
        asked: _Asked[T] = _Asked(items)
        if not self._waiting:
            wait_s = GATHER_BUSY_S if self._calls else GATHER_S
            asyncio.get_running_loop().call_later(wait_s, self._send)
        self._waiting.append(asked)
        return await asked.done

    def _send(self) -> None:
        together: dict[str, _Asked[T]] = {}
        for asked in self._waiting:
            if together.keys() & asked.items.keys():
                self._begin(together)
                together = {}
            together |= dict.fromkeys(asked.items, asked)
        self._waiting = []
        self._begin(together)

    def _begin(self, together: dict[str, _Asked[T]]) -> None:
        groups = list(dict.fromkeys(together.values()))
        call = asyncio.create_task(self._answer(groups, together), name="score")
        self._calls.add(call)

        def ended(call: asyncio.Task[None]) -> None:
            self._calls.discard(call)
            error = None if call.cancelled() else call.exception()
            for asked in groups:
                if error is not None and not asked.done.done():
                    asked.done.set_exception(error)

        def gone(_: asyncio.Future[dict[str, T]]) -> None:
            # A call that has served all groups ends successfully by itself.
            if all(asked.done.done() for asked in groups) and any(asked.done.cancelled() for asked in groups):
                call.cancel()

        call.add_done_callback(ended)
        for asked in groups:
            asked.done.add_done_callback(gone)

    async def _answer(self, groups: list[_Asked[T]], together: dict[str, _Asked[T]]) -> None:
        items = [item for asked in groups for item in asked.items.values()]
        await self._call(
            items,
            [asked.span for asked in groups],
            lambda sample_id, outcome: together[sample_id].take(sample_id, outcome),
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one sample: a finite total, or a failure with its reason."""

    total: float | None
    failure: str = ""
    timed_out: bool = False
    unverifiable: bool = False
    """The response made a verifier fail; where the run drops such a sample, it has no total."""
    terms: tuple[float, ...] = ()
    """The value of each reward, in the order of the configuration."""
    verdicts: tuple[TermVerdict, ...] = ()
    """What each reward said, up to the first that failed."""
    traceback: str = ""
    """The frames of the user's code that raised."""

    @property
    def failed(self) -> bool:
        """Return whether a reward failed, which is no fault of the response."""
        return self.total is None and not self.unverifiable

    def beside(self, played: Outcome) -> Outcome:
        """Return this outcome of the terms together with that of the episode: their rewards are added."""
        both = None if self.total is None or played.total is None else self.total + played.total
        return replace(self, total=both, verdicts=(*played.verdicts, *self.verdicts))

    @property
    def report(self) -> str:
        """Return the reason of a failure, with the traceback where there is one."""
        return f"{self.failure}\n{self.traceback}" if self.traceback else self.failure


@dataclass(frozen=True)
class Needs:
    """Needs of the rewards of a run beside each response."""

    whole_groups: bool = False
    """All responses of a group at once, because a reward compares them."""
    token_ids: bool = False


class TermScorer(Protocol):
    """The source of the values of some terms of a reward."""

    @property
    def terms(self) -> tuple[RewardTermConfig, ...]:
        """Return the terms, in the order of the components of a value."""

    async def needs(self) -> Needs:
        """Return what the terms take."""

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        """Return one outcome for every item."""


class Scorer:
    """Makes one reward of the terms of a run."""

    def __init__(
        self, source: TermScorer, mode: RewardMode = "weighted", tally: JudgeTally | None = None
    ) -> None:
        self._mode = mode
        self._tally = tally or JudgeTally()
        self._source = source
        self._judged = {term.shown for term in source.terms if term.judge}

    async def needs(self) -> Needs:
        """Return what the rewards take, all together."""
        return await self._source.needs() if self._source.terms else Needs()

    async def score(self, items: list[pb.ScoreItem]) -> dict[str, Outcome]:
        """Return one outcome for every item; without reward terms there is no call, and every total is 0."""
        terms = self._source.terms
        if not terms:
            return {item.sample_id: Outcome(0.0) for item in items}
        outcomes = await self._source.outcomes(items)
        if self._judged:
            self._tally.note(self._judged, outcomes.values())
        return {item.sample_id: weigh(terms, outcomes[item.sample_id], self._mode) for item in items}


def combined(mode: RewardMode, terms: Sequence[RewardTermConfig], values: Sequence[float]) -> float:
    """Return the reward that the values of all terms make; a term without a weight counts as a gate alone."""
    weighed = [term.weight * value for term, value in zip(terms, values, strict=True)]
    counted = [one for term, one in zip(terms, weighed, strict=True) if term.weight]
    gates = [term.gate_at for term in terms]
    closed = any(least is not None and value < least for least, value in zip(gates, values, strict=True))
    if not counted or (mode == "gated" and closed):
        return 0.0
    match mode:
        case "min":
            return min(counted)
        case "max":
            return max(counted)
        case "product":
            return math.prod(counted)
        case "first":
            return next((one for one in counted if one), 0.0)
    return sum(counted)


def weigh(
    terms: Sequence[RewardTermConfig], outcome: pb.ScoreOutcome, mode: RewardMode = "weighted"
) -> Outcome:
    """Return the outcome of a sample from that of its terms."""
    components = said_of(outcome)
    if outcome.WhichOneof("outcome") != "value":
        return _failed(outcome, list(starmap(_verdict, by_name(terms, components))))
    whole = len(components) == len(terms)
    # A response that is left out has no values of terms that compare it with others.
    pairs = zip(terms, components, strict=True) if whole else by_name(terms, components)
    verdicts = tuple(starmap(_verdict, pairs))
    unverifiable = any(one.outcome is Said.UNVERIFIABLE for one in verdicts)
    if dropping := next((one for one in verdicts if one.value is None), None):
        why = f"reward {dropping.reward}: {dropping.message}"
        return Outcome(None, why, unverifiable=True, verdicts=verdicts)
    if not whole:
        return Outcome(None, f"{len(terms)} rewards gave {len(components)} values")
    values = tuple(one.value for one in verdicts if one.value is not None)
    total = combined(mode, terms, values) if all(map(math.isfinite, values)) else math.nan
    if not abs(total) <= LARGEST_REWARD:
        parts = ", ".join(
            f"{term.weight:g} x {value:g} ({term.shown})" for term, value in zip(terms, values, strict=True)
        )
        made = "weighted sum" if mode in ("weighted", "gated") else f"reward by mode {mode}"
        why = f"reward {terms[-1].shown}: the {made} is {total}: {parts}"
        return Outcome(None, why, verdicts=verdicts)
    return Outcome(total, unverifiable=unverifiable, terms=values, verdicts=verdicts)


def said_of(outcome: pb.ScoreOutcome) -> Sequence[pb.RewardComponent]:
    """Return what the terms said, also where another one failed."""
    return outcome.value.components or outcome.before


def by_name(
    terms: Sequence[RewardTermConfig], components: Iterable[pb.RewardComponent]
) -> list[tuple[RewardTermConfig, pb.RewardComponent]]:
    """Return those terms that said something, each with what it said."""
    said: dict[str, deque[pb.RewardComponent]] = defaultdict(deque)
    for component in components:
        said[component.reward].append(component)
    return [(term, said[term.shown].popleft()) for term in terms if said[term.shown]]


def _verdict(term: RewardTermConfig, component: pb.RewardComponent) -> TermVerdict:
    """Return what a term said; the run decides what an unverifiable response is worth."""
    worth = None if term.on_unverifiable == "drop" else term.on_unverifiable
    return TermVerdict(
        term.shown,
        Said.UNVERIFIABLE if component.unreadable else Said.SCORED,
        worth if component.unreadable else component.value,
        {part.name: part.value for part in component.parts},
        component.extracted if component.HasField("extracted") else None,
        component.version,
        _seconds(component.elapsed),
        component.why or ("the response made its verifier fail" if component.unreadable else ""),
    )


def _failed(outcome: pb.ScoreOutcome, before: Sequence[TermVerdict]) -> Outcome:
    """Return the outcome of a sample whose reward failed."""
    if outcome.WhichOneof("outcome") == "timeout":
        late = outcome.timeout
        limit_s = _seconds(late.limit)
        why = f"reward {late.reward} took longer than {limit_s:g} s, by its timeout_s"
        verdict = TermVerdict(
            late.reward,
            Said.TIMEOUT,
            version=late.version,
            seconds=limit_s,
            message=why,
            file=late.file,
            line=late.line,
        )
        return Outcome(None, why, timed_out=True, verdicts=(*before, verdict))
    error = outcome.error
    verdict = TermVerdict(
        error.reward,
        Said.ERROR,
        version=error.version,
        seconds=_seconds(error.elapsed),
        message=error.message,
        file=error.file,
        line=error.line,
    )
    return Outcome(None, error.message, verdicts=(*before, verdict), traceback=error.traceback)


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


class RewardServiceScorer:
    """Calls the reward service for one run."""

    def __init__(
        self,
        run_id: str,
        terms: tuple[RewardTermConfig, ...],
        pool: ReplicaPool[RewardServiceAsyncStub],
        wait_limit_s: float,
        offer: Callable[[Path], FolderReference] | None = None,
        total_steps: int | None = None,
        judges: FleetJudges | None = None,
    ) -> None:
        self.terms = terms
        self._judges = judges or FleetJudges({})
        self._run_id = run_id
        self._total_steps = total_steps
        self._offer = offer
        """Offers a file of the user's to replicas on other hosts; None where all are on this one."""
        self._pool = pool
        self._wait_limit_s = wait_limit_s
        self._specs = [reward_spec(term) for term in terms]
        self._gathering: ScoreGathering[pb.ScoreOutcome] = ScoreGathering(self._scored)
        self._looked_at = -math.inf
        """The time of the last look at the files of the user's."""
        self._needs: Needs | None = None
        """What the replica of the last call said that the terms take."""
        self._asking = asyncio.Lock()

    async def needs(self) -> Needs:
        """Return what the terms take, which only a process that may load functions of the user's can tell."""
        async with self._asking:
            if self._needs is None:
                await self._scored([], [], lambda _, outcome: None)
            self._needs = self._needs or Needs()
        return self._needs

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        """Return one outcome for every item, in calls that groups share."""
        return await self._gathering.outcomes(items)

    async def _rewards(self) -> list[pb.RewardSpec]:
        """Return the terms, with the generators of judges, and references to the user's files of a few seconds ago."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            files = {spec.reward: file for spec in self._specs if (file := file_of_function(spec.reward))}
            references = await asyncio.to_thread(self._references, files)
            for spec in self._specs:
                spec.ClearField("code")
                if spec.reward in references:
                    spec.code.CopyFrom(references[spec.reward])
        await self._judges.write(self._specs)
        return self._specs

    def _references(self, files: dict[str, Path]) -> dict[str, FolderReference]:
        """Offer these files; to list the modules beside them takes a while on a shared disk."""
        found = {}
        for reward, file in files.items():
            if self._offer is not None:
                with suppress(FlotillaError):  # a replica that needs the file says what is wrong with it
                    found[reward] = self._offer(file)
        return found

    async def _scored(
        self, items: list[pb.ScoreItem], askers: list[SpanContext], take: Take[pb.ScoreOutcome]
    ) -> None:
        missing = {item.sample_id: item for item in items}
        attributes: dict[str, str | int] = {names.RUN_ID: self._run_id, names.SAMPLES: len(items)}
        with telemetry.span(names.RL_REWARD, attributes=attributes, links=askers):
            for call in range(MAX_CALLS):
                rewards, load = await self._rewards(), Load(len(missing))
                replica = await self._pool.acquire(
                    load, timeout_s=self._wait_limit_s, what="a reward replica"
                )
                try:
                    await self._call(replica.stub, rewards, missing, take)
                except (Unavailable, DeadlineExceeded) as error:
                    self._pool.eject(replica.instance_id, str(error))
                    self._judges.doubt(rewards, str(error))
                    if call == MAX_CALLS - 1:
                        raise
                    continue
                finally:
                    self._pool.release(replica, load)
                if not missing:
                    return
        for sample_id in missing:
            none = pb.RewardError(message="the reward service returned no outcome")
            take(sample_id, pb.ScoreOutcome(error=none))

    async def _call(
        self,
        stub: RewardServiceAsyncStub,
        rewards: list[pb.RewardSpec],
        missing: dict[str, pb.ScoreItem],
        take: Take[pb.ScoreOutcome],
    ) -> None:
        """Call one replica; items that it answers are no longer missing."""
        request = pb.ScoreRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            items=missing.values(),
            rewards=rewards,
            total_steps=self._total_steps,
        )
        # This side cannot tell how long the items wait behind those of other calls.
        stream = rpc.server_stream(stub.Score, request, idle_timeout_s=SILENT_S)
        async with aclosing(stream) as replies:
            async for reply in replies:
                if reply.terms:
                    self._needs = Needs(
                        any(one.whole_groups for one in reply.terms),
                        any(one.token_ids for one in reply.terms),
                    )
                for outcome in reply.outcomes:
                    if missing.pop(outcome.sample_id, None) is not None:
                        take(outcome.sample_id, outcome)


def reward_spec(term: RewardTermConfig) -> pb.RewardSpec:
    """Return one term as the reward service takes it."""
    parameters, timeout = Struct(), Duration()
    parameters.update(term.parameters | _said_to_judge(term))
    timeout.FromNanoseconds(int(term.timeout_s * 1e9))
    return pb.RewardSpec(
        reward=str(term.reward),
        name=term.name,
        parameters=parameters,
        timeout=timeout,
        trusted=term.trusted,
        blames_response=term.blames_response,
        drops_unverifiable=term.on_unverifiable == "drop",
    )


def _said_to_judge(term: RewardTermConfig) -> dict[str, Any]:
    """Return the keys of a judge's term that are set."""
    scale = [*term.scale] if term.scale is not None else None
    said = {"rubric": term.rubric, "scale": scale, "verdicts": term.verdicts, "pairs": term.pairs}
    return {name: value for name, value in said.items() if value}


def score_item(
    sample_id: str,
    prompt: Prompt,
    response: str,
    *,
    group: str = "",
    token_ids: np.ndarray | None = None,
    step: int | None = None,
) -> pb.ScoreItem:
    """Return one item of a Score call; `group` is that of the samples which it is compared with."""
    info, column = Struct(), Struct()
    info.update(prompt.info)
    column.update(prompt.answer_column)
    return pb.ScoreItem(
        sample_id=sample_id,
        prompt=prompt.prompt_text,
        response=response,
        answer=prompt.answer,
        info=info,
        chat=[Message(role=one["role"], content=one["content"]) for one in prompt.chat],
        answer_column=column,
        group=group,
        token_ids=None if token_ids is None else to_tensor(token_ids),
        step=step,
    )
