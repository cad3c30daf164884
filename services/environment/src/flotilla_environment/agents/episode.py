"""One episode that an agent plays: its requests are the turns that are asked for.

Invariants: a reward is what the agent gave, or what the last turn that it heard is worth; an agent that fails has none.
One that was killed is started again once, and told the turns that there are while it asks for the same; else the caller
begins the episode anew. When the episode is closed, nothing of its agent is left, and its key is worth nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.structs import to_json
from flotilla_environment.agents.agents import Agents
from flotilla_environment.agents.pool import Seat
from flotilla_environment.agents.process import Exit
from flotilla_environment.agents.spec import CORRECT, AgentSpec
from flotilla_environment.episode import MOST_DEATHS, STOPS, limit_of, task_of, with_waits
from flotilla_environment.gateway.fields import assistant
from flotilla_environment.gateway.histories import Histories
from flotilla_environment.gateway.session import Ask, Session
from flotilla_environment.gateway.told import told
from flotilla_environment.gateway.turns import asked_of, completed_of, digest_of
from flotilla_environment.waits import Waits
from flotilla_workers.process import Failure, Timeout

STOP_GRACE_S = 10.0
"""The time that an agent has to end by itself once it gets no further turn."""
CORRECT_NAME = "correct"
UNHEARD_NAME = "unheard_turns"
AGENT_LATE = "make the agent faster between its requests, or raise environment.call_timeout_s of the run"


@dataclass(frozen=True)
class Said:
    """A turn that an agent asks for, or its end."""

    asked: pb.TurnAsked
    digest: bytes = b""
    """Equal for turns that are asked for alike."""
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Lost(Exception):
    """The agent was killed."""

    def __init__(self, exit: Exit) -> None:
        super().__init__(exit.told)
        self.exit = exit


class AgentEpisode:
    """An episode with some agent."""

    late = AGENT_LATE

    def __init__(self, start: pb.EpisodeStart, agents: Agents) -> None:
        self.name = start.environment.environment
        self._start = start
        self._spec = AgentSpec.of(to_json(start.environment.parameters))
        self._agents = agents
        self._call_limit_s = limit_of(start)
        self._place = AsyncExitStack()
        self._session: Session | None = None
        self._seat: Seat | None = None
        self._histories = Histories()
        self._deaths = 0
        self._asked: tuple[Ask, bytes] | None = None
        """The turn that is asked for now, and its digest."""
        self._past: list[tuple[bytes, pb.TurnWritten]] = []
        """The turns so far, with the digests of what asked for them."""
        self._given: list[tuple[Ask, str]] = []
        """The turns that were given to the agent as it runs now, with the text that it hears of each."""
        self.waits = Waits()

    async def begin(self) -> Said | Failure | Timeout:
        """Start the agent, and return the first turn that it asks for."""
        self.waits.begin()
        await self._place.enter_async_context(self._agents.places.place(self._start.run_id))
        self.waits.end()
        return await self._said()

    async def reply(self, written: pb.TurnWritten) -> Said | Failure | Timeout:
        """Tell the agent what the policy wrote, and return the next turn that it asks for, or its end."""
        assert self._asked is not None, "a turn answers what was asked for"
        self._past.append((self._asked[1], written))
        self._give(written)
        return await self._said()

    async def stop(self, ending: pb.Ending.ValueType) -> Said | Failure | Timeout:
        """Refuse further turns; return the rewards, whatever the agent makes of that."""
        assert self._session is not None and self._seat is not None
        self._session.close(f"the episode has ended: {STOPS[ending]}")
        ended = asyncio.ensure_future(self._session.ended.wait())
        limit_s = min(STOP_GRACE_S, self._call_limit_s)
        await asyncio.wait((ended, self._seat.exit), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return self._rewarded()

    async def _said(self) -> Said | Failure | Timeout:
        """Return what the agent says next; start it again where it was killed."""
        while True:
            try:
                if self._seat is None:
                    again = await self._begun()
                    if again is not None:
                        return again
                return await self._next()
            except _Lost as lost:
                await self._let_go("its agent was lost")
                self._deaths += 1
                if self._deaths >= MOST_DEATHS:
                    return _failure(lost.exit)

    async def _begun(self) -> Failure | Timeout | None:
        """Start the agent, and tell it the turns so far; return why it did not come so far."""
        start = self._start
        task = {name: value for name, value in task_of(start).items() if name != "answer"}
        self._histories, self._given = Histories(), []
        self._session = self._agents.gateway.sessions.open(task)
        if CORRECT[self._spec.correct] is not None:
            self._session.given = frozenset({CORRECT_NAME})
        self._seat = await self._agents.seat(
            self._spec, start.environment.trusted, start.run_id, self._session, self.waits
        )
        if not self._past:
            return None
        with self.waits.once_more():
            for digest, written in self._past:
                outcome = await self._next()
                if not isinstance(outcome, Said):
                    return outcome
                if outcome.done or outcome.digest != digest:
                    raise FailedPrecondition(
                        "the episode cannot go on with another process of its agent",
                        where=self.name,
                        why="its process was lost, and the agent did not ask for the same again",
                    )
                self._give(written)
        return None

    async def _next(self) -> Said | Failure | Timeout:
        """Return the next turn that the agent asks for, or its end."""
        assert self._session is not None and self._seat is not None
        now = asyncio.get_running_loop().time
        late_at = now() + self._call_limit_s
        while True:
            asks = asyncio.ensure_future(self._session.next())
            ended = asyncio.ensure_future(self._session.ended.wait())
            try:
                done, _ = await asyncio.wait(
                    (asks, ended, self._seat.exit),
                    timeout=max(late_at - now(), 0.0),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                asks.cancel()
                ended.cancel()
            if ended in done:
                what, traceback = self._session.failure
                return Failure(what + self._way_out(), traceback) if what else self._rewarded()
            if asks in done:
                said = self._asks(asks.result())
                if said is not None:
                    return said
            elif not done:
                await self._let_go("its agent took too long", hangs=True)
                return Timeout(self._call_limit_s)
            else:
                return self._exited(self._seat.exit.result())

    def _way_out(self) -> str:
        """Return what to do about the failure that an agent tells, where it is its jail's."""
        assert self._session is not None
        if self._session.of_system is None or self._spec.comes_by_itself:
            return ""
        return self._agents.way_out(self._spec, self._start.environment.trusted, *self._session.of_system)

    def _asks(self, ask: Ask) -> Said | None:
        """Return the turn that is asked for; None where it is refused, and the agent told so."""
        assert self._session is not None
        completion = ask.request.completion
        try:
            asked = asked_of(completion, self._histories.hear(completion.messages))
        except InvalidRequest as error:
            self._session.refuse(ask, error)
            return None
        digest = digest_of(asked)
        self._asked = ask, digest
        return Said(asked, digest)

    def _give(self, written: pb.TurnWritten) -> None:
        """Tell the agent its turn."""
        assert self._session is not None and self._asked is not None
        (ask, _), request = self._asked, self._asked[0].request
        number = self._session.answered + 1
        done = completed_of(written, f"{self._session.id}-{number}", request.model)
        heard = told(request.completion, done)
        self._histories.say(heard.message, assistant(done.content, [*done.calls]))
        self._given.append((ask, heard.content))
        self._session.answer(ask, done)

    def _exited(self, exit: Exit) -> Said | Failure:
        if exit.killed:
            raise _Lost(exit)
        return _failure(exit) if exit.status else self._rewarded()

    def _rewarded(self) -> Said:
        """Return the end of the episode, with its rewards."""
        assert self._session is not None
        rewards = dict(self._session.rewards)
        heard = [text for ask, text in self._given if ask.delivered]
        if (is_right := CORRECT[self._spec.correct]) is not None:
            rewards[CORRECT_NAME] = float(is_right(heard[-1] if heard else "", self._start.answer))
        unheard = float(len(self._given) - len(heard))
        return Said(pb.TurnAsked(), done=True, rewards=rewards, metrics={UNHEARD_NAME: unheard})

    def metrics(self, said: Said) -> Mapping[str, float]:
        """Return those of its end: an agent gives rewards alone."""
        return said.metrics

    def says(self, **part: Any) -> pb.RunEpisodeResponse:
        """Return a response, with the time that the episode has waited."""
        return with_waits(self.waits, **part)

    async def close(self) -> None:
        """Free what the episode holds."""
        try:
            await self._let_go("its episode has ended")
        finally:
            await self._place.aclose()

    async def _let_go(self, why: str, hangs: bool = False) -> None:
        session, seat, self._seat = self._session, self._seat, None
        if session is not None:
            self._agents.gateway.sessions.close(session, why)
        if seat is not None:
            await seat.close(hangs)


def _failure(exit: Exit) -> Failure:
    return Failure(f"the agent {exit.told}", exit.printed)
