"""Policy and critic: they learn side by side, lie in one checkpoint, and come back together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.trainers import messages
from flotilla_coordinator.trainers.learners import Learners
from flotilla_coordinator.trainers.roles import Critic
from flotilla_coordinator.trainers.session import GROUPS_AT_ONCE, Gang
from flotilla_core import rpc
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.errors import Damaged, FailedPrecondition, FlotillaError, Unavailable
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_testing.files import NO_FILES, to_nobody

NAME = "step-000004"


class Session:
    """One of two; its update ends when both have begun, its files are real."""

    def __init__(self, both: asyncio.Barrier) -> None:
        self._both = both
        self.trained = 0
        self.loaded: list[Path] = []
        self.refuses: FlotillaError | None = None

    async def train(self, batch: Batch) -> pb.UpdateResult:
        self.trained += 1
        await self._both.wait()
        return pb.UpdateResult(update_id="run/0.1", metrics={"loss": 0.5})

    async def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        yield pb.SaveCheckpointResponse(snapshot=pb.CheckpointSnapshot())
        if self.refuses is not None:
            raise self.refuses
        shelf = CheckpointShelf(folder.parent)
        (shelf.begin(folder.name) / "coordinator.json").write_bytes(state)
        nbytes = Manifest.seal(shelf.aside(folder.name)).nbytes
        shelf.publish(folder.name)
        yield pb.SaveCheckpointResponse(durable=pb.CheckpointDurable(path=str(folder), bytes=nbytes))

    async def load(self, folder: Path, *, fresh_optimizer: bool, fresh_objective: bool) -> bytes:
        assert not fresh_optimizer and not fresh_objective
        Manifest.verified(folder)
        await asyncio.sleep(0)
        self.loaded.append(folder)
        return (folder / "coordinator.json").read_bytes()


class Bench:
    def __init__(self, folder: Path, together: int = 2) -> None:
        both = asyncio.Barrier(together)
        self.policy, self.critic = Session(both), Session(both)
        policy: Any = self.policy
        critic: Any = self.critic
        self.learners = Learners(policy, critic, critic_steps=2)
        self.shelf = CheckpointShelf(folder / "checkpoints")

    async def save(self) -> list[str]:
        stages = self.learners.save(self.shelf.path / NAME, b"here")
        return [str(stage.WhichOneof("stage")) async for stage in stages]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def batch(step: int, samples: int = 1) -> Batch:
    tokens = np.arange(3, dtype=np.int32)
    groups = [
        RolloutGroup(f"run/{i}", "prompt", tokens, [RolloutSample(f"run/{i}/0", tokens + i, None, "text")])
        for i in range(samples)
    ]
    return Batch(step, groups, {})


async def test_both_learn_from_a_batch_side_by_side(bench: Bench) -> None:
    learned = await asyncio.wait_for(bench.learners.train(batch(2)), 5)
    assert learned.policy is not None and learned.metrics == {"loss": 0.5, "critic/loss": 0.5}


async def test_on_the_same_gpus_the_critic_learns_after_the_policy() -> None:
    turns: list[str] = []

    class Turn:
        def __init__(self, name: str) -> None:
            self._name = name

        async def train(self, batch: Batch) -> pb.UpdateResult:
            turns.append(f"{self._name} begins")
            await asyncio.sleep(0)
            turns.append(f"{self._name} ends")
            return pb.UpdateResult(update_id="run/0.1", metrics={"loss": 0.5})

    policy: Any = Turn("policy")
    critic: Any = Turn("critic")
    learned = await Learners(policy, critic, in_turns=True).train(batch(0))
    assert turns == ["policy begins", "policy ends", "critic begins", "critic ends"]
    assert learned.metrics == {"loss": 0.5, "critic/loss": 0.5}


async def test_the_first_steps_teach_the_critic_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, together=1)
    for step in range(3):
        learned = await bench.learners.train(batch(step))
        assert (learned.policy is None) == (step < 2)
    assert (bench.policy.trained, bench.critic.trained) == (1, 3)
    assert not learned.skipped


class Opening:
    """A session that opens after `turns` of the event loop, or cannot."""

    def __init__(self, turns: int, refusal: FlotillaError | None = None) -> None:
        self._turns = turns
        self._refusal = refusal
        self.opened = False

    async def open(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if self._refusal is not None:
            raise self._refusal
        self.opened = True


async def test_a_gang_that_cannot_open_is_alone_in_having_no_session() -> None:
    policy: Any = Opening(turns=9)
    critic: Any = Opening(turns=1, refusal=Unavailable("the critic went away"))
    learners = Learners(policy, critic)
    with pytest.raises(Unavailable, match="the critic"):
        await learners.open()
    assert [session.opened for session in learners.sessions] == [True, False]


async def test_one_checkpoint_holds_both(bench: Bench) -> None:
    assert await bench.save() == ["snapshot", "durable"]
    assert bench.shelf.names() == [NAME]
    folder = bench.shelf.folder(NAME)
    assert "critic/coordinator.json" in Manifest.verified(folder).files
    assert sorted(path.name for path in bench.shelf.path.iterdir()) == ["latest", NAME]
    assert await bench.learners.load(folder) == b"here"
    assert (bench.policy.loaded, bench.critic.loaded) == ([folder], [folder / "critic"])


@pytest.mark.parametrize("whose", ["policy", "critic"])
async def test_a_part_that_cannot_be_written_leaves_no_checkpoint(bench: Bench, whose: str) -> None:
    getattr(bench, whose).refuses = FailedPrecondition("the checkpoint cannot be written")
    with pytest.raises(FailedPrecondition):
        await bench.save()
    assert list(bench.shelf.path.iterdir()) == []
    getattr(bench, whose).refuses = None
    await bench.save()
    assert bench.shelf.names() == [NAME]


async def test_one_without_the_other_is_damaged(bench: Bench) -> None:
    await bench.save()
    folder = bench.shelf.folder(NAME)
    (folder / "critic" / "coordinator.json").write_bytes(b"else")
    with pytest.raises(Damaged):
        await bench.learners.load(folder)
    assert bench.policy.loaded == bench.critic.loaded == []


def critic_of(stub: Any) -> Critic:
    async def nobody() -> list[str]:
        return []

    gang = Gang("critic", stub, "critic-1", 1.0, "critic", NO_FILES, None, to_nobody)
    return Critic("run", session_pb2.SessionSpec(), gang, nobody)


async def test_every_sample_gets_its_own_values_however_many_calls_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    async def compute(request: pb.ComputeValuesRequest, **_: Any) -> pb.ComputeValuesResponse:
        calls.append(len(request.sequences))
        reply = pb.ComputeValuesResponse()
        for sequence in reversed(request.sequences):
            values = np.append(from_tensor(sequence.token_ids), 7 if request.after_last else []).astype("f4")
            reply.sequences.add(sequence_id=sequence.sequence_id, values=to_tensor(values))
        return reply

    monkeypatch.setattr(rpc, "unary", lambda method, request, **options: method(request, **options))
    monkeypatch.setattr(messages, "PART_BYTES", 40)
    stub: Any = SimpleNamespace(ComputeValues=compute)

    critic = critic_of(stub)
    valued = batch(0, samples=5)
    await critic.value(valued)
    assert calls == [2, 2, 1]
    for sample in valued.samples:
        np.testing.assert_array_equal(sample.values, sample.token_ids.astype(np.float32))
    valued.groups[3].samples[0].truncated = True
    message = pb.TrainGroup()
    messages.fill(message, valued.groups[3])
    np.testing.assert_array_equal(from_tensor(message.samples[0].values), [3.0, 4.0, 5.0])
    assert (message.samples[0].value_after, message.samples[0].truncated) == (7.0, True)


async def test_others_get_their_turns_while_a_batch_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[pb.TrainRequest] = []
    turns = 0

    async def train(method: Any, requests: Any, **_: Any) -> pb.TrainResponse:
        sent.extend([request async for request in requests])
        return pb.TrainResponse(result=pb.UpdateResult(update_id="run/0.1"))

    async def somebody_else() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(rpc, "client_stream", train)
    critic = critic_of(SimpleNamespace(Train=None))
    other = asyncio.create_task(somebody_else())
    await critic.train(batch(0, samples=64))
    other.cancel()
    assert [len(request.chunk.groups) for request in sent] == [0, 64]
    assert turns >= 64 // GROUPS_AT_ONCE
