"""One checkpoint of several gangs: each seals its part out of sight, then all come to light at once.

Invariants: readers see a checkpoint whole or not at all, because the parts are inside each other and sealed together
before the one rename that shows them; a part that fails costs this checkpoint alone, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.learning_session import LearningSession
from flotilla_core.checkpoint import CheckpointShelf, Manifest, on_disk
from flotilla_core.errors import Unavailable
from flotilla_core.roles import POLICY
from flotilla_core.tasks import all_of, all_settled

Stages = AsyncGenerator[pb.SaveCheckpointResponse]


async def save_jointly(
    folder: Path, state: bytes, policy: LearningSession, beside: Mapping[str, LearningSession]
) -> Stages:
    """The policy's checkpoint with those of others inside, each in a folder of its name; stages as of a single one."""
    shelf, name = CheckpointShelf(folder.parent), folder.name
    aside = await asyncio.to_thread(on_disk, folder, shelf.begin, name)
    whole = aside / POLICY / name
    parts = {role: aside / role / name for role in beside}
    try:
        async with AsyncExitStack() as saves:
            stages = [policy.save(whole, state)]
            stages += [session.save(parts[role], b"") for role, session in beside.items()]
            for stage in stages:
                await saves.enter_async_context(aclosing(stage))
            snapshots = await all_of(next_stage(stage) for stage in stages)
            yield max(snapshots, key=lambda one: one.snapshot.stall.ToNanoseconds())
            durables = await all_settled(next_stage(stage) for stage in stages)
        manifest = await asyncio.to_thread(on_disk, folder, _join, shelf, name, whole, parts)
    finally:
        await asyncio.to_thread(shelf.discard, name)
    slowest = max(durables, key=lambda one: one.durable.elapsed.ToNanoseconds())
    durable = pb.CheckpointDurable(path=str(folder), bytes=manifest.nbytes, elapsed=slowest.durable.elapsed)
    yield pb.SaveCheckpointResponse(durable=durable)


async def next_stage(stages: Stages) -> pb.SaveCheckpointResponse:
    """The next message of a save, which a gang may not end before its last."""
    async for stage in stages:
        return stage
    raise Unavailable("the trainer ended the save without a result")


def _join(shelf: CheckpointShelf, name: str, whole: Path, parts: Mapping[str, Path]) -> Manifest:
    for role, part in parts.items():
        part.rename(whole / role)
    manifest = Manifest.join(whole, parts)
    shelf.publish(name, whole)
    return manifest
