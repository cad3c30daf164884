"""One episode, as the call of its caller plays it.

Invariants: it ends with exactly one `ended`, unless its caller leaves, and then its environment is closed. Only what
the environment itself gave at its end is a reward: an error and a piece of work above its limit have none. An episode
whose worker is lost for the sake of another one is played again in a new worker, from its start and with the turns that
there are. It goes on where the environment says the same again; else its caller begins it anew.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    UserCodeError,
)
from flotilla_core.structs import to_json
from flotilla_environment.holders import Holder, Holders, Outcome, Said, owner_of
from flotilla_environment.waits import Waits
from flotilla_workers.functions import Target
from flotilla_workers.process import Failure, Timeout

BEAT_S = 5.0
"""A caller takes a replica for dead that is silent for several times as long."""
CALL_LIMIT_S = 30.0
CLOSE_LIMIT_S = 10.0
MOST_DEATHS = 2
"""Deaths of a worker at work for one episode that are this episode's fault."""
MOST_BEGINNINGS = 10
"""Workers in which one episode is begun, before it counts as lost."""
STOPS = {pb.ENDING_MAX_TURNS: "max_turns", pb.ENDING_NO_ROOM: "no_room"}
_PLACE = re.compile(r"(?P<where>\S.*?:\d+) in \S+: (?P<what>.*)", re.DOTALL)
_numbers = itertools.count()


class Saying(Protocol):
    """The words of whoever plays an episode: a turn that is asked for, or the end."""

    @property
    def done(self) -> bool: ...

    @property
    def asked(self) -> pb.TurnAsked: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def rewards(self) -> Mapping[str, float]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


SayingT = TypeVar("SayingT", bound=Saying)


class Played(Protocol[SayingT]):
    """An episode as it is played, whoever plays it."""

    name: str
    late: str
    """The way out where it took too long."""

    async def begin(self) -> SayingT | Failure | Timeout:
        """Return what is said first."""
        ...

    async def reply(self, written: pb.TurnWritten) -> SayingT | Failure | Timeout:
        """Return what is said to a turn of the policy."""
        ...

    async def stop(self, ending: pb.Ending.ValueType) -> SayingT | Failure | Timeout:
        """Return the rewards of an episode that gets no further turn."""
        ...

    def metrics(self, said: SayingT) -> Mapping[str, float]:
        """Return the numbers of an episode at its end."""
        ...

    def says(self, **part: Any) -> pb.RunEpisodeResponse:
        """Return a response, with the time that the episode has waited."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...


class Episode:
    """An episode in some worker."""

    late = (
        "its worker was ended, and other episodes in it begin again: make the method faster, raise "
        "environment.call_timeout_s of the run, or give environment.workers of the stack more"
    )

    def __init__(self, start: pb.EpisodeStart, target: Target, holders: Holders) -> None:
        self.name = start.environment.environment
        self._start = start
        self._call_limit_s = limit_of(start)
        self._target = target
        self._owner = owner_of(target, start.run_id)
        self._holders = holders
        self._holder: Holder | None = None
        self._number = next(_numbers)
        self._past: list[tuple[dict[str, Any], bytes]] = []
        """The questions so far, and what each answer was."""
        self._deaths = 0
        self._programs: Counter[str] = Counter()
        self.waits = Waits()
        self.is_over = False

    async def begin(self) -> Said | Failure | Timeout:
        return await self._said("begin", task=task_of(self._start))

    async def reply(self, written: pb.TurnWritten) -> Said | Failure | Timeout:
        return await self._said("reply", turn=turn_of(written))

    async def stop(self, ending: pb.Ending.ValueType) -> Said | Failure | Timeout:
        return await self._said("stop", ending=STOPS[ending])

    async def _said(self, do: str, **question: Any) -> Said | Failure | Timeout:
        """Return what the environment says to one more question."""
        asked = {"do": do, "episode": self._number, **question}
        for _ in range(MOST_BEGINNINGS):
            outcome = await self._asked(asked)
            if outcome is None:
                continue
            if isinstance(outcome, Said):
                self._past.append((asked, outcome.digest))
                if outcome.programs and not outcome.done:
                    await self._run(outcome)
            self.is_over = not isinstance(outcome, Said) or outcome.done
            return outcome
        raise FailedPrecondition(
            f"the episode lost its worker {MOST_BEGINNINGS} times",
            where=self.name,
            why="other episodes of the run kill workers, or the machine does",
            next_step="Read the log of this service.",
        )

    async def _run(self, said: Said) -> None:
        """Run the programs of the policy that the environment names, and tell of them in its messages."""
        told = await self._holders.run([*said.programs.values()], self._owner.run_id, self.waits)
        for place, (text, _) in zip(said.programs, told, strict=True):
            said.messages[place].content = text
        self._programs.update(programs=len(told), program_errors=sum(failed for _, failed in told))

    def metrics(self, said: Said) -> dict[str, float]:
        """Return the numbers of the environment, with those of its programs."""
        return {name: float(count) for name, count in self._programs.items()} | said.metrics

    def says(self, **part: Any) -> pb.RunEpisodeResponse:
        return with_waits(self.waits, **part)

    async def _asked(self, question: dict[str, Any]) -> Outcome:
        """Ask once, in a worker in which the episode stands where it was; None where this worker is lost."""
        if self._holder is None or self._holder.lost:
            self._let_go()
            self._holder = self._holders.take(self._owner)
            with self.waits.once_more():
                outcome = await self._played_again(self._holder)
            if self._past and not isinstance(outcome, Said):
                return outcome
        return await self._blamed(self._holder, question)

    async def _played_again(self, holder: Holder) -> Outcome:
        """Play the turns so far in another worker; return what came of the last one."""
        outcome: Outcome = None
        for past, digest in self._past:
            outcome = await self._blamed(holder, past)
            if not isinstance(outcome, Said):
                return outcome
            if outcome.digest != digest:
                raise FailedPrecondition(
                    "the episode cannot go on in another worker",
                    where=self.name,
                    why="its worker was lost, and the environment did not say the same again",
                )
        return outcome

    async def _blamed(self, holder: Holder, question: dict[str, Any]) -> Outcome:
        """Return the outcome; a worker that dies at work is the fault of the episode where that happens again."""
        outcome = await holder.ask(self._target, question, self._call_limit_s, self.waits)
        if isinstance(outcome, Failure) and holder.lost:
            self._deaths += 1
            return outcome if self._deaths >= MOST_DEATHS else None
        return outcome

    async def close(self) -> None:
        holder = self._holder
        try:
            if holder is not None and not holder.lost and not self.is_over:
                with suppress(FlotillaError):  # It says again why the environment does not load.
                    closing = {"do": "close", "episode": self._number}
                    await holder.ask(self._target, closing, CLOSE_LIMIT_S, self.waits)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.give_back()
        self._holder = None


async def play(
    episode: Played[SayingT], parts: AsyncIterator[pb.RunEpisodeRequest]
) -> AsyncGenerator[pb.RunEpisodeResponse]:
    """Play an episode: the environment asks for turns, `parts` answers them."""
    turns: list[float | None] = []
    ending, doing = pb.ENDING_COMPLETED, "begin"
    work = asyncio.ensure_future(episode.begin())
    try:
        while True:
            while not (await asyncio.wait((work,), timeout=BEAT_S))[0]:
                yield episode.says(beat=pb.Beat())
            outcome = work.result()
            if isinstance(outcome, Failure | Timeout):
                yield episode.says(ended=_failed(outcome, f"{episode.name}: {doing}", episode.late))
                return
            if doing.startswith("reply"):
                turns[-1] = outcome.reward
            if outcome.done:
                rewards = [] if all(one is None for one in turns) else [one or 0.0 for one in turns]
                ended = pb.EpisodeEnded(ending=ending, rewards=outcome.rewards, turn_rewards=rewards)
                ended.metrics.update(episode.metrics(outcome))
                yield episode.says(ended=ended)
                return
            yield episode.says(asked=outcome.asked)
            part = await anext(parts, None)
            if part is None:
                return  # The caller ended its side: nobody hears what is said.
            if part.WhichOneof("part") == "written":
                turns.append(None)
                doing = f"reply to turn {len(turns)}"
                work = asyncio.ensure_future(episode.reply(part.written))
                continue
            ending, doing = _stop(part), "stop"
            work = asyncio.ensure_future(episode.stop(ending))
    finally:
        work.cancel()


def with_waits(waits: Waits, **part: Any) -> pb.RunEpisodeResponse:
    """Return a response, with the time that its episode has waited."""
    response = pb.RunEpisodeResponse(**part)
    response.waited.FromNanoseconds(int(waits.total_s * 1e9))
    return response


def limit_of(start: pb.EpisodeStart) -> float:
    """Return the time of each piece of work."""
    return start.call_limit.ToNanoseconds() / 1e9 if start.HasField("call_limit") else CALL_LIMIT_S


def task_of(start: pb.EpisodeStart) -> dict[str, Any]:
    """Return the data of an episode."""
    return {
        "messages": [_message(message) for message in start.messages],
        "answer": start.answer,
        "info": to_json(start.info),
        "seed": start.seed,
        "attempt": start.attempt,
    }


def _message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates know it."""
    plain = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def turn_of(written: pb.TurnWritten) -> dict[str, Any]:
    return {
        "content": written.message.content,
        "calls": _message(written.message).get("tool_calls", []),
        "unparsed": written.unparsed,
        "cut": written.finish == pb.TURN_FINISH_LENGTH,
        "tokens": written.tokens,
        "tokens_left": written.tokens_left,
    }


def _stop(part: pb.RunEpisodeRequest) -> pb.Ending.ValueType:
    """Return the ending that a caller asks for."""
    if part.WhichOneof("part") != "stop" or part.stop.ending not in STOPS:
        raise InvalidRequest(
            "the part is no answer to the turn that was asked for",
            next_step=f"Send written, or stop with one of {', '.join(STOPS.values())}.",
        )
    return part.stop.ending


def _failed(outcome: Failure | Timeout, doing: str, late: str) -> pb.EpisodeEnded:
    if isinstance(outcome, Timeout):
        error = DeadlineExceeded(
            f"the environment took longer than {outcome.limit_s:g} s",
            where=doing,
            next_step=late,
        )
        return pb.EpisodeEnded(ending=pb.ENDING_TIMEOUT, failure=error.finding())
    return pb.EpisodeEnded(ending=pb.ENDING_ERROR, failure=_finding(outcome, doing))


def _finding(failure: Failure, doing: str) -> Finding:
    """Return what failed, and in which line of the user's."""
    found = _PLACE.fullmatch(failure.message)
    where, what = (found["where"], found["what"]) if found else ("", failure.message)
    step = "play it by hand: `flotilla env test`" if found else "see `flotilla logs environment`"
    return UserCodeError(
        f"{doing} failed: {what}", where=where, why=failure.traceback, next_step=step
    ).finding()
