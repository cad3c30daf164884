"""Samples wait for each other as long as the caller allows, and never for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np
import pytest

from flotilla_core.errors import Internal
from flotilla_generator.engine.base import FinishReason, Sample
from flotilla_generator.servicer import gathered

LIMIT_S = 10.0
FOREVER_S = 1e6


def sample(name: str) -> Sample:
    tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    return Sample(name, tokens, logprobs, FinishReason.STOP, (), 0.0, 0.0, 0.0)


class Engine:
    """Yields what it is told, one after the other."""

    def __init__(self, *endings: str, failure: Exception | None = None) -> None:
        self.going_on = [asyncio.Event() for _ in endings]
        self.closed = False
        self._endings = endings
        self._failure = failure

    async def generate(self) -> AsyncGenerator[list[Sample]]:
        try:
            for names, event in zip(self._endings, self.going_on, strict=True):
                await event.wait()
                yield [sample(name) for name in names]
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True

    def go_on(self) -> None:
        for event in self.going_on:
            event.set()


async def messages(engine: Engine, wait_s: float) -> list[str]:
    async with asyncio.timeout(LIMIT_S), aclosing(gathered(engine.generate(), wait_s)) as together:
        return ["".join(one.sample_id for one in samples) async for samples in together]


async def test_the_last_ones_never_wait_and_take_along_who_waits() -> None:
    engine = Engine("a", "bc", "d")
    engine.go_on()
    assert await messages(engine, FOREVER_S) == ["abcd"]


async def test_nobody_waits_longer_than_the_caller_allows() -> None:
    engine = Engine("a", "b")
    engine.going_on[0].set()
    async with asyncio.timeout(LIMIT_S), aclosing(gathered(engine.generate(), 0.001)) as together:
        assert [one.sample_id for one in await anext(together)] == ["a"]
        engine.going_on[1].set()
        assert [one.sample_id for one in await anext(together)] == ["b"]


async def test_what_ends_while_a_message_is_handed_on_is_not_lost() -> None:
    engine = Engine("a", "b", "c")
    engine.going_on[0].set()
    async with asyncio.timeout(LIMIT_S), aclosing(gathered(engine.generate(), 0.001)) as together:
        assert [one.sample_id for one in await anext(together)] == ["a"]
        engine.go_on()
        while not engine.closed:
            await asyncio.sleep(0)
        assert [[one.sample_id for one in samples] async for samples in together] == [["b", "c"]]


async def test_without_leave_to_wait_everything_comes_as_the_engine_yields_it() -> None:
    engine = Engine("a", "bc", "d")
    engine.go_on()
    assert await messages(engine, 0) == ["a", "bc", "d"] and engine.closed


async def test_what_ended_before_an_engine_failed_is_handed_on() -> None:
    engine = Engine("a", "b", failure=Internal("it broke"))
    engine.go_on()
    got: list[str] = []
    with pytest.raises(Internal, match="it broke"):
        async with asyncio.timeout(LIMIT_S), aclosing(gathered(engine.generate(), FOREVER_S)) as together:
            async for samples in together:
                got += [one.sample_id for one in samples]
    assert got == ["a", "b"]


@pytest.mark.parametrize("wait_s", [0.0, 0.001])
async def test_closing_closes_the_engine_s_own_iterator(wait_s: float) -> None:
    engine = Engine("a", "b")
    engine.going_on[0].set()
    async with asyncio.timeout(LIMIT_S), aclosing(gathered(engine.generate(), wait_s)) as together:
        await anext(together)
        assert not engine.closed
    assert engine.closed
