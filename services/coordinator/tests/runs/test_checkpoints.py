"""When a run is saved: the loop waits for the snapshot alone, and a save that fails is a warning."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.checkpoints import Progress, RunCheckpoints, named_best
from flotilla_coordinator.runs.loop import run_loop
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.config import CheckpointConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, NotFound
from flotilla_core.version import Version

RUN = "run-1"


class Trainer:
    """Saves into real folders, as slowly and as badly as a test says."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.no_snapshot: FlotillaError | None = None
        self.not_durable: FlotillaError | None = None

    async def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        if self.no_snapshot is not None:
            raise self.no_snapshot
        yield pb.SaveCheckpointResponse(snapshot=pb.CheckpointSnapshot())
        await self.may_write.wait()
        if self.not_durable is not None:
            error, self.not_durable = self.not_durable, None
            raise error
        shelf = CheckpointShelf(folder.parent)
        aside = shelf.begin(folder.name)
        (aside / "coordinator.json").write_bytes(state)
        nbytes = Manifest.seal(aside).nbytes
        shelf.publish(folder.name)
        yield pb.SaveCheckpointResponse(durable=pb.CheckpointDurable(path=str(folder), bytes=nbytes))


class Bench:
    def __init__(self, ledger: Ledger, folder: Path, best_by: str = "") -> None:
        self.evaluated: dict[int, float] = {}
        self.awaited: int | None = None
        self.trainer = Trainer()
        self.warnings: list[str] = []
        self.covered: list[tuple[Version, int]] = []
        self.shelf = CheckpointShelf(folder)
        learners: Any = self.trainer
        config = CheckpointConfig(every_steps=2, keep=2, best_by=best_by)
        self.checkpoints = RunCheckpoints(
            RUN,
            config,
            learners,
            ledger=ledger,
            shelf=self.shelf,
            warn=self.warnings.append,
            evaluated=lambda metric: self.evaluated if metric == best_by else {},
            awaited=lambda: self.awaited,
        )

    async def save(self, steps_done: int) -> None:
        progress = Progress(RUN, steps_done, Version(0, steps_done), {"position": steps_done}, 0.5)
        await asyncio.wait_for(self.checkpoints.save(progress), 5)

    def at_its_last_step(self, steps_done: int) -> Any:
        """A run with nothing left but its end; the disk takes a checkpoint once somebody waits for it."""

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            if name == "write checkpoint":
                self.trainer.may_write.set()
            yield

        async def nothing(*_: Any) -> None:
            await asyncio.sleep(0)

        version = Version(0, steps_done)
        return SimpleNamespace(
            run_id=RUN,
            config=SimpleNamespace(steps=steps_done, stop=None, export_final=False),
            last_accuracy=None,
            learners=SimpleNamespace(open=nothing),
            policy=SimpleNamespace(version=version),
            source=SimpleNamespace(samples_from_policy=True),
            sync=SimpleNamespace(publish=nothing, version=version),
            wait_for_canary=nothing,
            evaluator=None,
            pinned=None,
            checkpoints=self.checkpoints,
            steps_done=steps_done,
            wait_for_next_step=nothing,  # which says no
            take_no_changes=lambda: None,
            phase=phase,
            update_unrecorded=False,
            progress=lambda steps_done: Progress(RUN, steps_done, version, None),
            evaluated=lambda _: True,
        )


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", str(tmp_path), time.time()))
    made = Bench(ledger, tmp_path / "checkpoints", getattr(request, "param", ""))
    yield made
    await made.checkpoints.close()
    ledger.close()


def test_one_is_due_after_every_so_many_steps(bench: Bench) -> None:
    assert [step for step in range(1, 7) if bench.checkpoints.due(step)] == [2, 4, 6]
    bench.checkpoints.newest = 4
    assert not bench.checkpoints.due(4)


async def test_the_loop_waits_for_the_snapshot_alone(bench: Bench) -> None:
    bench.trainer.may_write.clear()
    await bench.save(2)
    assert bench.checkpoints.writing and bench.shelf.names() == []
    second = asyncio.create_task(bench.save(4))
    done, _ = await asyncio.wait({second}, timeout=0.1)
    assert not done  # at most one is under way
    bench.trainer.may_write.set()
    await asyncio.wait_for(second, 5)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000002", "step-000004"] and not bench.warnings
    assert bench.checkpoints.take_metrics().keys() == {"checkpoint/write_s", "checkpoint/bytes"}
    assert bench.checkpoints.take_metrics() == {}


async def test_the_newest_stay_and_the_oldest_of_them_says_what_is_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    covered = []

    async def record(self: Ledger, run_id: str, version: Version, step: int) -> int:
        covered.append((version, step))
        return 0

    monkeypatch.setattr(Ledger, "covered", record)
    for step in (2, 4, 6):
        await bench.save(step)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000004", "step-000006"]
    assert covered == [(Version(0, 2), 2), (Version(0, 2), 2), (Version(0, 4), 4)]


BEST_BY = pytest.mark.parametrize("bench", ["eval/reward_mean"], indirect=True)


@BEST_BY
async def test_the_best_one_stays_beside_the_newest_and_a_better_one_takes_its_place(bench: Bench) -> None:
    bench.evaluated = {0: 0.9, 2: 0.1, 4: 0.5, 6: 0.5, 8: 0.2}  # the start of the run is no checkpoint
    for step in (2, 4, 6, 8, 10):
        await bench.save(step)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000004", "step-000008", "step-000010"]
    bench.evaluated[12] = 0.6
    for step in (12, 14, 16):
        await bench.save(step)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000012", "step-000014", "step-000016"]


@BEST_BY
async def test_a_new_best_is_due_at_once_and_an_equal_or_worse_one_is_not(bench: Bench) -> None:
    bench.evaluated = {2: 0.5, 3: 0.5, 5: 0.4, 7: 0.6}
    await bench.save(2)
    await bench.checkpoints.settle()
    assert [step for step in (3, 5, 7, 9) if await bench.checkpoints.best_due(step)] == [7]


@BEST_BY
async def test_a_checkpoint_whose_evaluation_is_under_way_stays_until_its_result(bench: Bench) -> None:
    bench.awaited = 3
    assert await bench.checkpoints.best_due(3)
    bench.evaluated = {2: 0.5}
    for step in (2, 3, 4, 6):
        await bench.save(step)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000002", "step-000003", "step-000004", "step-000006"]
    bench.awaited, bench.evaluated[3] = None, 0.6
    await bench.save(8)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000003", "step-000006", "step-000008"]


def test_best_names_the_checkpoint_whose_evaluation_was_best(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "stack" / "runs" / "run-1")
    for step, accuracy in ((0, 0.9), (2, 0.25), (4, 0.5), (6, 0.5)):
        directory.write_evaluation(step, f"0.{step}", accuracy, {"eval/reward_mean": 1 - accuracy})
        shelf = CheckpointShelf(directory.checkpoints_path)
        if step:
            Manifest.seal(shelf.begin(shelf.name_of(step)))
            shelf.publish(shelf.name_of(step))
    assert named_best(directory, "eval/accuracy") == "step-000004"
    assert named_best(directory, "eval/reward_mean") == "step-000002"
    with pytest.raises(NotFound, match="no checkpoint has an evaluation with eval/pass@8"):
        named_best(directory, "eval/pass@8")
    with pytest.raises(NotFound, match=r"checkpoint\.best_by is empty"):
        named_best(directory, "")


@pytest.mark.parametrize("stage", ["no_snapshot", "not_durable"])
async def test_a_save_that_fails_is_a_warning_and_the_next_one_works(bench: Bench, stage: str) -> None:
    setattr(
        bench.trainer, stage, FailedPrecondition("the checkpoint cannot be written", why="the disk is full")
    )
    await bench.save(2)
    await bench.checkpoints.settle()
    (warning,) = bench.warnings
    assert "after step 2 failed, and the run continues" in warning and "the disk is full" in warning
    assert bench.checkpoints.newest == -1  # so that the end of a run sees that it has none
    setattr(bench.trainer, stage, None)
    await bench.save(4)
    await bench.checkpoints.settle()
    assert bench.shelf.names() == ["step-000004"]


async def test_a_last_checkpoint_that_could_not_be_written_is_tried_again_at_the_end(bench: Bench) -> None:
    bench.trainer.may_write.clear()
    bench.trainer.not_durable = FailedPrecondition("the checkpoint cannot be written")
    await bench.save(2)
    await asyncio.wait_for(run_loop(bench.at_its_last_step(2), StartPoint()), 5)
    assert bench.shelf.names() == ["step-000002"] and len(bench.warnings) == 1


async def test_progress_comes_back_as_it_was(bench: Bench) -> None:
    await bench.save(2)
    await bench.checkpoints.settle()
    found = Progress.of(bench.shelf.folder("step-000002"))
    assert found == Progress(RUN, 2, Version(0, 2), {"position": 2}, 0.5)
