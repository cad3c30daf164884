"""Garbage of a service does not stay in its memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import FrameType

import pytest

from flotilla_core.errors import FailedPrecondition
from flotilla_core.service.operate import format_stacks
from flotilla_core.service.process import GarbageCollection

COLLECTED_WITHIN_S = 10.0


class Batch:
    """Something large that refers to itself."""

    def __init__(self, nbytes: int) -> None:
        self.data = b"\1" * nbytes
        self.own = self


@pytest.fixture
def restored_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("restored_collector")
async def test_garbage_in_circles_is_collected_once_the_process_has_grown() -> None:
    collection = GarbageCollection(look_every_s=0.01)
    batch = Batch(512 << 20)
    gc.collect(1)  # Now it is too old for the collections of young objects.
    gone = asyncio.Event()
    weakref.finalize(batch, gone.set)
    del batch
    try:
        assert await asyncio.wait_for(gone.wait(), COLLECTED_WITHIN_S)
    finally:
        collection.stop()


async def test_looking_at_stacks_keeps_no_frame_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        assert "test_looking_at_stacks" in format_stacks()
        own = [
            one
            for one in gc.get_objects()
            if isinstance(one, FrameType) and one.f_code is format_stacks.__code__
        ]
    finally:
        gc.enable()
    assert not own


def test_an_error_that_is_raised_again_keeps_no_call_alive() -> None:
    stored = FailedPrecondition(
        "the session has ended", where="run a", why="it was closed", next_step="open one"
    )

    def refuse() -> None:
        raise stored.again()

    for _ in range(3):
        with pytest.raises(FailedPrecondition) as raised:
            refuse()
        assert str(raised.value) == str(stored)
    assert stored.__traceback__ is None
