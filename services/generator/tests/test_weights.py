"""Claims about who may change a replica's weights while something else is under way; the engine is a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import FailedPrecondition, StaleVersion, WeightGroupFailed, WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.engine.base import (
    Applied,
    EngineInfo,
    KvPolicy,
    Received,
    Verified,
    WeightsHalfWritten,
    WeightsNotLive,
)
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
        self.lost = False
        """Whether the live weights are no version any more when the group is left."""
        self.brings: Received | Exception = Received(((5,),), in_place=True)

    async def receive(self, progress: Callable[[int], None], kv_policy: KvPolicy) -> Received:
        self.calls.append("receive")
        if isinstance(self.brings, Exception):
            raise self.brings
        return self.brings

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        self.calls.append("apply")
        return Applied(0.0, 0.0, 0.0)

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        self.calls.append("join")

    async def drop(self) -> bool:
        self.calls.append("drop")
        return self.lost

    async def tag(self, version: Version | None) -> None:
        self.calls.append("tag")
        await self.go_on.wait()

    async def verify(self) -> Verified:
        if self.live_fault is not None:
            raise self.live_fault
        return Verified(3)


def session_on(engine: Engine) -> WeightSession:
    return WeightSession(engine)  # type: ignore[arg-type]


async def test_live_weights_that_changed_break_the_replica_and_another_version_is_refused() -> None:
    engine = Engine()
    session = session_on(engine)
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
    session = session_on(engine)
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
    session = session_on(engine)
    with pytest.raises(StaleVersion, match="its boot weights"):
        session.require_serving("run", Version(0, 4))
    await session.adopt("run", Version(0, 4))
    session.require_serving("run", Version(0, 4))
    for run_id, newer in (("run", Version(0, 5)), ("other", Version(0, 4))):
        with pytest.raises(StaleVersion, match=r"version 0\.4 of run run"):
            session.require_serving(run_id, newer)
    await session.join("other", weights_pb2.WeightGroup(epoch=1), 1, MANIFEST)
    assert session.live is None and session.run_id == "other"


def sent(version: Version, digest: int) -> weights_pb2.WeightDigests:
    return weights_pb2.WeightDigests(
        version=version.to_proto(), manifest_digest=MANIFEST.digest, tensor_digests=[digest]
    )


async def joined(engine: Engine) -> WeightSession:
    """A session that serves version 0.1 and receives into the live weights."""
    engine.go_on.set()
    session = session_on(engine)
    await session.join("run", weights_pb2.WeightGroup(epoch=1), 1, MANIFEST)
    await session.stage("run", 1, Version(0, 1))
    await session.commit("run", 1, Version(0, 1), KvPolicy.REUSE, sent(Version(0, 1), 5))
    assert session.live == Version(0, 1) and session.phase is Phase.IDLE
    engine.calls.clear()
    return session


async def test_weights_in_place_that_are_not_what_was_sent_break_the_replica_until_others_are_whole() -> None:
    engine = Engine()
    session = await joined(engine)
    await session.stage("run", 1, Version(0, 2))
    session.require_serving("run", None)
    with pytest.raises(WeightsMismatch, match="nothing decodes here") as refused:
        await session.commit("run", 1, Version(0, 2), KvPolicy.REUSE, sent(Version(0, 2), 6))
    assert "arrived otherwise than sent: w" in str(refused.value)
    assert engine.calls == ["receive", "drop"] and session.phase is Phase.BROKEN
    with pytest.raises(FailedPrecondition, match="arrived otherwise"):
        session.require_serving("run", None)
    await session.join("run", weights_pb2.WeightGroup(epoch=2), 1, MANIFEST)
    await session.stage("run", 2, Version(0, 2))
    await session.commit("run", 2, Version(0, 2), KvPolicy.REUSE, sent(Version(0, 2), 5))
    session.require_serving("run", Version(0, 2))


async def test_weights_in_place_that_nobody_commits_break_the_replica() -> None:
    engine = Engine()
    session = await joined(engine)
    await session.stage("run", 1, Version(0, 2))
    await session.abort("run")
    assert session.phase is Phase.BROKEN and engine.calls == ["receive", "drop"]


async def test_a_transfer_in_place_that_broke_off_breaks_the_replica_and_blames_the_group() -> None:
    engine = Engine()
    session = await joined(engine)
    engine.brings = WeightsHalfWritten("the sender is gone")
    with pytest.raises(WeightGroupFailed, match="the sender is gone"):
        await session.stage("run", 1, Version(0, 2))
    assert session.phase is Phase.BROKEN and session.live is None


@pytest.mark.parametrize("lost", [False, True])
async def test_what_an_unknown_error_left_of_the_live_weights_the_engine_says(lost: bool) -> None:
    engine = Engine()
    session = await joined(engine)
    engine.brings, engine.lost = RuntimeError("nobody knows"), lost
    with pytest.raises(RuntimeError, match="nobody knows"):
        await session.stage("run", 1, Version(0, 2))
    assert engine.calls == ["receive", "drop"]
    assert (session.phase is Phase.BROKEN) is lost and (session.live is None) is lost


async def test_the_live_version_that_arrives_in_place_once_more_is_applied_once_more() -> None:
    engine = Engine()
    session = await joined(engine)
    await session.stage("run", 1, Version(0, 1))
    await session.commit("run", 1, Version(0, 1), KvPolicy.REUSE, sent(Version(0, 1), 5))
    assert engine.calls == ["receive", "apply"], "what stands still goes on by a commit alone"
