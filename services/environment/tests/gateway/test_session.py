"""Which requests are repetitions of which: each turn is asked for once, and told to no other request."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from flotilla_core.errors import Exhausted, InvalidRequest
from flotilla_environment.gateway import session as module
from flotilla_environment.gateway.dialect import Completed, Completion
from flotilla_environment.gateway.session import Ask, Request, Session

LIMIT_S = 10.0
"""For a turn that somebody waits for to be the next."""


def request(text: str = "One?", **marks: Any) -> Request:
    return Request.of(Completion(()), "any", "/v1/chat/completions", text.encode(), **marks)


async def answered(session: Session, ask: Ask, *, delivered: bool = True) -> None:
    """Give a turn to the next ask, which is this one."""
    with ask.awaited() as answer:
        assert await asyncio.wait_for(session.next(), LIMIT_S) is ask
        session.answer(ask, Completed(str(session.answered), "any", 0, ""))
        await answer
        ask.delivered = delivered


async def test_of_equal_requests_a_repetition_gets_the_turn_of_the_one_that_was_lost() -> None:
    session = Session({})
    first, others = session.ask(request()), []
    with ExitStack() as waiting:
        with first.awaited():
            for _ in range(3):
                others.append(session.ask(request()))
                waiting.enter_context(others[-1].awaited())
            assert await asyncio.wait_for(session.next(), LIMIT_S) is first
        assert session.ask(request(repeats=True)) is first
        session.answer(first, Completed("1", "any", 0, ""))
        assert session.ask(request(repeats=True)) is first, "its answer was not delivered either"
        first.delivered = True
        await answered(session, others[0])
        assert session.ask(request(repeats=True)) is others[0], "the client lost what was sent last"


async def test_a_repetition_whose_first_connection_nobody_has_missed_yet_is_no_second_sample() -> None:
    session = Session({})
    ask = session.ask(request())
    with ask.awaited():
        assert session.ask(request(repeats=True)) is ask
        assert session.ask(request()) is not ask, "a further sample"


async def test_what_repeats_a_refused_request_is_a_request_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    session, found, refused = Session({}), [], 0
    with ExitStack() as waiting:
        for _ in range(8):
            try:
                found.append(session.ask(request()))
                waiting.enter_context(found[-1].awaited())
            except Exhausted:
                refused += 1
        assert refused == 5
        for ask in found:
            await answered(session, ask)
        for _ in range(refused):
            found.append(session.ask(request(repeats=True)))
            await answered(session, found[-1])
    assert len({*found}) == 8
    assert session.ask(request(repeats=True)) is found[-1], "nothing else was refused"


async def test_a_marked_request_is_known_until_as_many_answers_as_are_kept_have_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 4)
    session = Session({})
    asks = []
    for number in range(5):
        asks.append(session.ask(request(str(number), mark=f"key {number}")))
        await answered(session, asks[-1], delivered=number % 2 == 0)
    for number in range(1, 5):
        assert session.ask(request(str(number), mark=f"key {number}")) is asks[number]
    assert session.ask(request("0", mark="key 0")) is not asks[0], "the oldest answer is kept no longer"
    with pytest.raises(InvalidRequest, match="Idempotency-Key"):
        session.ask(request("other", mark="key 1"))


async def test_a_request_that_waits_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 1)
    session = Session({})
    asks = {
        f"key {number}": session.ask(request(mark=f"key {number}")) for number in range(module.MOST_WAITING)
    }
    assert all(session.ask(request(mark=key)) is ask for key, ask in asks.items())
