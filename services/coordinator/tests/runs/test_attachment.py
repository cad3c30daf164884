"""A new coordinator goes on with the sessions of the one before only where nothing can be lost or made twice by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.runs import loop as loop_module
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.disk_waits import DiskWaits
from flotilla_coordinator.runs.resume import StartPoint, restore
from flotilla_coordinator.trainers.learners import Learners
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.errors import Cancelled, DeadlineExceeded, FlotillaError, RankFailed, Unavailable
from flotilla_core.version import Version

RUN = "run-20260314-0915-7f3a"
STEPS_DONE = 3
HERE, ANEW = Version(1, 3), Version(2, 2)
AFTER_COORDINATOR = StartPoint(2, after_coordinator=True)
LAST, FOLLOWING, LATER = (f"{RUN}/1.{step}" for step in (3, 4, 5))


def result(update_id: str, version: Version, skipped: str = "") -> pb.UpdateResult:
    return pb.UpdateResult(
        update_id=update_id, policy_version=version.to_proto(), skipped=skipped, metrics={"loss": 0.5}
    )


@dataclass
class Session:
    """The session of the run that one gang still holds."""

    found: tuple[Version, str] | None = (HERE, LAST)
    results: dict[str, pb.UpdateResult] = field(default_factory=lambda: {LAST: result(LAST, HERE)})
    fails: FlotillaError | None = None
    opened: bool = False
    opened_anew: bool = False
    anew: dict[str, bool] = field(default_factory=dict)
    """What of the checkpoint does not count."""
    version: Version = ANEW

    async def left(self) -> pb.GetSessionResponse | None:
        if self.found is None:
            return None
        version, last = self.found
        return pb.GetSessionResponse(policy_version=version.to_proto(), last_update_id=last)

    def attach(self, found: pb.GetSessionResponse) -> None:
        self.opened, self.version = True, Version.from_proto(found.policy_version)

    async def finished_update(self, update_id: str) -> pb.UpdateResult | None:
        if self.fails is not None:
            raise self.fails
        return self.results.get(update_id)

    async def open(self) -> None:
        self.opened = self.opened_anew = True

    async def load(self, folder: Path, **anew: bool) -> bytes:
        self.anew = anew
        return (folder / "coordinator.json").read_bytes()


class Run:
    """The part of a run's context that its start uses."""

    def __init__(self, ledger: Ledger, path: Path, critic: Session | None = None) -> None:
        self.session, self.critic = Session(), critic
        session: Any = self.session
        beside: Any = critic
        self.run_id, self.ledger, self.directory = RUN, ledger, RunDirectory(path)
        self.learners = Learners(session, beside, critic_steps=2)
        self.checkpoints = SimpleNamespace(shelf=CheckpointShelf(path / "checkpoints"), newest=-1)
        self.source = SimpleNamespace(restore=self._go_on)
        self.status = SimpleNamespace(
            notice=lambda finding: self.told.append(finding.what), run=run_pb2.Run()
        )
        self.told: list[str] = []
        self.disk = DiskWaits(
            cast(Any, SimpleNamespace(disk_has_room=lambda _: None)), RunControl(cast(Any, None))
        )
        self.rollouts: RolloutRecord | None = None
        self.stands: Progress | None = None
        self.place: tuple[int, Any] | None = None
        self.evaluation_every = 3
        self.begun = self.owes_evaluation = self.update_unrecorded = False

    @property
    def policy(self) -> Any:
        return self.session

    def phase(self, _name: str) -> Any:
        return nullcontext()

    def evaluation_due(self, steps_done: int) -> bool:
        return steps_done % self.evaluation_every == 0

    def restore(self, progress: Progress) -> None:
        self.stands = progress
        self.checkpoints.newest = progress.steps_done

    async def _go_on(self, steps_done: int, cursor: Any) -> None:
        self.place = (steps_done, cursor)

    async def begin(self) -> None:
        itself: Any = self
        await restore(itself, AFTER_COORDINATOR)

    @property
    def attached(self) -> bool:
        return self.begun and not self.session.opened_anew


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(
        RunRecord(
            RUN,
            "run",
            RunState.RUNNING,
            "{}",
            str(tmp_path),
            1.0,
            step=STEPS_DONE,
            version=HERE,
            cursor={"position": 9},
        )
    )
    yield ledger
    ledger.close()


@pytest.fixture
def run(ledger: Ledger, tmp_path: Path) -> Run:
    folder = tmp_path / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    (folder / "coordinator.json").write_bytes(Progress(RUN, 2, Version(1, 2), None).to_bytes())
    return Run(ledger, tmp_path)


async def test_sessions_that_stand_beside_the_ledger_are_taken_over_in_their_lineage(run: Run) -> None:
    run.directory.write_metrics(2, {"loss": 1.0}, lineage=1)
    run.directory.write_evaluation(3, "1.3", 0.75)
    await run.begin()
    assert run.attached and run.session.opened and run.session.version == HERE
    assert run.stands == Progress(RUN, STEPS_DONE, HERE, {"position": 9}, 0.75)
    assert run.place == (STEPS_DONE, {"position": 9}) and run.checkpoints.newest == 2
    assert not run.update_unrecorded and not run.owes_evaluation
    assert [metrics["loss"] for _, metrics in run.directory.read_metrics()] == [1.0]


@pytest.mark.parametrize(("every", "owes"), [(3, True), (2, True), (4, False)], ids=["now", "late", "later"])
async def test_an_evaluation_that_the_coordinator_did_not_come_to_is_made_up(
    run: Run, every: int, owes: bool
) -> None:
    """That of an earlier step went on beside the steps, on a generator of its own."""
    run.evaluation_every = every
    run.directory.write_evaluation(0, "1.0", 0.5)
    await run.begin()
    assert run.attached and run.owes_evaluation is owes


async def test_an_update_that_the_ledger_does_not_know_is_recorded_first_of_all(run: Run) -> None:
    run.session.found = (Version(1, 4), FOLLOWING)
    run.session.results[FOLLOWING] = result(FOLLOWING, Version(1, 4))
    await run.begin()
    assert run.attached and run.update_unrecorded
    assert run.session.version == HERE, "the step is recorded as the one that starts from there"


@pytest.mark.parametrize("became", ["skipped", "failed"])
async def test_an_update_that_moved_nothing_is_made_again_under_its_name(run: Run, became: str) -> None:
    run.session.found = (HERE, FOLLOWING)
    if became == "skipped":
        run.session.results[FOLLOWING] = result(FOLLOWING, HERE, "the gradient is not finite")
    await run.begin()
    assert run.attached and not run.update_unrecorded


@pytest.mark.parametrize(
    "found",
    [None, (Version(2, 3), LAST), (Version(1, 5), LATER), (Version(1, 3), f"{RUN}/1.1")],
    ids=["gone", "another lineage", "too far", "too old"],
)
async def test_any_other_session_is_left_for_a_checkpoint(
    run: Run, found: tuple[Version, str] | None, ledger: Ledger
) -> None:
    run.session.found = found
    await run.begin()
    assert run.session.opened_anew and run.begun
    assert "checkpoint step-000002" in run.told[-1]
    assert (await ledger.get_run(RUN)).version == Version(2, 2)


async def test_records_of_undone_steps_go_with_them(run: Run, tmp_path: Path) -> None:
    run.rollouts = record = RolloutRecord(tmp_path / "rollouts", RUN, 1.0, "digest")
    tokens = np.zeros(1, np.int32)
    one = RolloutSample("a", tokens, np.zeros(1, np.float32), "text")
    for step in range(4):
        record.write(Batch(step, [RolloutGroup("g", "prompt", tokens, [one])], {}), Version(1, step))
    run.session.found = None
    await run.begin()
    assert sorted(record.folder.iterdir()) == [record.path_of(0), record.path_of(1)]


async def test_a_fork_that_returns_to_its_first_checkpoint_begins_anew_what_it_began_anew(run: Run) -> None:
    begun = Progress(RUN, 2, Version(1, 2), None, fresh_optimizer=True)
    (run.checkpoints.shelf.folder("step-000002") / "coordinator.json").write_bytes(begun.to_bytes())
    run.session.found = None
    await run.begin()
    assert run.session.anew == {"fresh_optimizer": True, "fresh_objective": False}


@pytest.mark.parametrize("kind", [Unavailable, RankFailed, DeadlineExceeded, Cancelled])
async def test_a_session_that_is_lost_within_its_update_is_left_for_a_checkpoint(
    run: Run, kind: type[FlotillaError]
) -> None:
    run.session.found, run.session.fails = (HERE, FOLLOWING), kind("the update never ended")
    await run.begin()
    assert run.session.opened_anew and "checkpoint step-000002" in run.told[-1]


@pytest.mark.parametrize(("critic_made_it", "attached"), [(True, True), (False, False)])
async def test_a_policy_is_taken_over_only_with_a_critic_that_stands_beside_it(
    ledger: Ledger, tmp_path: Path, run: Run, critic_made_it: bool, attached: bool
) -> None:
    critic = Session(found=(Version(1, 4), FOLLOWING) if critic_made_it else (HERE, LAST))
    critic.results[FOLLOWING] = result(FOLLOWING, Version(1, 4))
    both = Run(ledger, tmp_path, critic)
    (tmp_path / "checkpoints" / "step-000002" / "critic").mkdir()
    (tmp_path / "checkpoints" / "step-000002" / "critic" / "coordinator.json").write_bytes(b"")
    both.session.found = (Version(1, 4), FOLLOWING)
    both.session.results[FOLLOWING] = result(FOLLOWING, Version(1, 4))
    await both.begin()
    assert both.attached is attached


class BareLoop:
    """A loop of which only the order of what it does matters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, unrecorded: bool) -> None:
        self.done: list[str] = []
        for name, what in (("restore", "begin"), ("_train_one_step", "step"), ("_sync", "sync")):
            monkeypatch.setattr(loop_module, name, self._noting(what))
        monkeypatch.setattr(loop_module, "_save_last_checkpoint", self._noting("end"))
        self.run: Any = SimpleNamespace(
            run_id=RUN,
            update_unrecorded=unrecorded,
            owes_evaluation=False,
            pinned=None,
            steps_done=STEPS_DONE,
            step=lambda _: nullcontext(),
            wait_for_next_step=self._goes_on,
            take_no_changes=lambda: None,
            policy=SimpleNamespace(version=HERE),
            sync=SimpleNamespace(version=HERE),
            wait_for_canary=self._noting("canary"),
            evaluated=lambda _: True,
            last_accuracy=None,
            checkpoints=SimpleNamespace(due=lambda _: False),
            config=SimpleNamespace(stop=None, export_final=False),
        )
        self.steps_wanted = 0

    def _noting(self, what: str) -> Any:
        async def note(_run: Any = None, step: Any = None) -> None:
            self.done.append(f"{what} {step}" if what == "step" else what)

        return note

    async def _goes_on(self) -> bool:
        self.steps_wanted -= 1
        return self.steps_wanted >= 0


@pytest.mark.parametrize(("unrecorded", "first"), [(True, "step 3"), (False, "sync")])
async def test_an_update_that_nobody_recorded_comes_before_everything_also_before_a_stop(
    monkeypatch: pytest.MonkeyPatch, unrecorded: bool, first: str
) -> None:
    loop = BareLoop(monkeypatch, unrecorded=unrecorded)
    await loop_module.run_loop(loop.run, AFTER_COORDINATOR)
    assert loop.done == ["begin", first, "canary", "end"]


@pytest.mark.parametrize(("unrecorded", "first"), [(True, "step 3"), (False, "sync")])
async def test_a_run_that_met_its_stop_rule_makes_no_further_step_when_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch, unrecorded: bool, first: str
) -> None:
    loop = BareLoop(monkeypatch, unrecorded=unrecorded)
    loop.steps_wanted = 5
    loop.run.config.stop = SimpleNamespace(accuracy_at_least=0.5, accuracy_at_most=None)
    loop.run.last_accuracy = 0.5
    await loop_module.run_loop(loop.run, AFTER_COORDINATOR)
    assert loop.done == ["begin", first, "canary", "end"]
