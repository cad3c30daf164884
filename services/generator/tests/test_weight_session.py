"""Claims about who may change a replica's weights while something else is under way; the engine is a script."""

from __future__ import annotations

import asyncio

import pytest

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import FailedPrecondition, StaleVersion, WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.engine.base import EngineInfo, Verified, WeightsNotLive
from flotilla_generator.weights import Phase, WeightSession
from flotilla_weights.manifest import Manifest

LIMIT_S = 10.0
MANIFEST = Manifest.from_named([("w", "float32", (2, 2))], 1 << 20)


class Engine:
    """What a session calls, in order; `tag` takes until it is let."""

    info = EngineInfo(100, 100, 1)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go_on = asyncio.Event()
        self.live_fault: WeightsNotLive | None = None

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        self.calls.append("join")

    async def drop(self) -> None:
        self.calls.append("drop")

    async def tag(self, version: Version | None) -> None:
        self.calls.append("tag")
        await self.go_on.wait()

    async def verify(self) -> Verified:
        if self.live_fault is not None:
            raise self.live_fault
        return Verified(3)


async def test_live_weights_that_changed_break_the_replica_and_another_version_is_refused() -> None:
    engine = Engine()
    session = WeightSession(engine)  # type: ignore[arg-type]
    session.run_id, session.live = "run", Version(0, 2)
    assert await session.verify("run", Version(0, 2)) == Verified(3)
    for other in (Version(0, 1), Version(0, 3)):
        with pytest.raises(StaleVersion):
            await session.verify("run", other)
    engine.live_fault = WeightsNotLive("w changed")
    with pytest.raises(WeightsMismatch, match="w changed"):
        await session.verify("run", Version(0, 2))
    assert session.phase is Phase.BROKEN
    with pytest.raises(FailedPrecondition, match="w changed"):
        session.require_serving("run", None)


async def test_what_a_former_run_ends_too_late_is_not_the_group_of_the_next_run() -> None:
    engine = Engine()
    session = WeightSession(engine)  # type: ignore[arg-type]
    session.run_id = "former"
    joining = asyncio.create_task(session.join("next", weights_pb2.WeightGroup(epoch=1), 1, MANIFEST))
    async with asyncio.timeout(LIMIT_S):
        while "tag" not in engine.calls:
            await asyncio.sleep(0)
        ending = asyncio.create_task(session.abort("former"))
        await asyncio.sleep(0)
        engine.go_on.set()
        await asyncio.gather(joining, ending)
    assert engine.calls == ["drop", "tag", "join"]
    assert session.run_id == "next" and session.epoch == 1 and session.buckets_total == 1


async def test_boot_weights_that_are_a_version_are_served_as_it_until_another_run_joins() -> None:
    engine = Engine()
    engine.go_on.set()
    session = WeightSession(engine)  # type: ignore[arg-type]
    with pytest.raises(StaleVersion, match="its boot weights"):
        session.require_serving("run", Version(0, 4))
    await session.adopt("run", Version(0, 4))
    session.require_serving("run", Version(0, 4))
    for run_id, newer in (("run", Version(0, 5)), ("other", Version(0, 4))):
        with pytest.raises(StaleVersion, match=r"version 0\.4 of run run"):
            session.require_serving(run_id, newer)
    await session.join("other", weights_pb2.WeightGroup(epoch=1), 1, MANIFEST)
    assert session.live is None and session.run_id == "other"
