"""The ledger under a run whose deliveries repeat and come late, and whose coordinator and trainer die at any time.

After every rule the states of all samples are those of a small model, and the independent judge finds nothing lost,
trained twice or unexpected.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    REOPENED,
    REWARDS_FAILED,
    DropReason,
    FinishedSample,
    GroupIssue,
    Recorded,
    RunRecord,
    RunState,
    SampleState,
    TokenSpan,
)
from flotilla_core.errors import FailedPrecondition
from flotilla_core.version import Version
from flotilla_testing.ledger_counts import counts_of

T = TypeVar("T")
State = SampleState

pytestmark = pytest.mark.timeout(300)

RUN = "chaos-20260314-0915-7f3a"
TOKENS = np.array([1, 2], dtype=np.int32)
LOGPROBS = np.zeros(2, dtype=np.float32)
KEPT_CHECKPOINTS = 2
OPEN = (State.ISSUED, State.GENERATED, State.SCORED)
OF_THE_SAMPLE = "tired"
REASONS = (OF_THE_SAMPLE, *REOPENED, *REWARDS_FAILED)


@dataclass
class Sample:
    """The expected record of one sample."""

    step: int
    state: State = State.ISSUED
    reason: str = ""
    sampled_at: int = 0
    scored: bool = False
    """Whether it has a reward."""


@dataclass(frozen=True)
class Update:
    """One that was made and not undone."""

    update_id: str
    started_from: int
    samples: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """One that is kept."""

    steps_done: int
    version_step: int


class LedgerMachine(RuleBasedStateMachine):
    """The model: samples, the updates that stand, the checkpoints that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.lives = 0
        self.ledger = Ledger.open(self.root / "0" / "ledger.sqlite")
        self.do(self.ledger.save_run(RunRecord(RUN, "chaos", RunState.RUNNING, "{}", "", time.time())))
        self.samples: dict[str, Sample] = {}
        self.updates: list[Update] = []
        self.checkpoints: list[Checkpoint] = []
        self.version = Version(0, 0)
        self.steps_done = 0
        self.groups = 0
        self.ended = False
        self.stale: set[str] = set()

    def do(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(operation)

    def pick(self, data: st.DataObject, *states: State) -> list[str]:
        known = sorted(name for name, sample in self.samples.items() if not states or sample.state in states)
        return (
            data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1, max_size=6)) if known else []
        )

    def moved(self, names: list[str] | tuple[str, ...], state: State, reason: str = "") -> None:
        for name in names:
            self.samples[name].state, self.samples[name].reason = state, reason

    def arrived(self, name: str) -> FinishedSample:
        spans = (TokenSpan(self.version, 0, 2),)
        return FinishedSample(name, TOKENS, LOGPROBS, "", spans, reward=1.0)

    @precondition(lambda self: not self.ended)
    @rule(size=st.integers(1, 4), ahead=st.integers(0, 1))
    def issue(self, size: int, ahead: int) -> None:
        group_id = f"{RUN}/0/{self.groups}"
        self.groups += 1
        names = tuple(f"{group_id}/{index}" for index in range(size))
        step = self.steps_done + ahead
        for asked in (names, names[::-1]):  # asked for twice, in another order: admitted once
            self.do(self.ledger.group_issued(GroupIssue(RUN, group_id, asked, step, 0, "", TOKENS)))
        self.samples |= {name: Sample(step) for name in names}

    @rule(data=st.data())
    def deliver_without_scores(self, data: st.DataObject) -> None:
        names = self.pick(data)
        recorded = self.do(self.ledger.group_generated([self.arrived(name) for name in names]))
        fresh = [name for name in names if self.samples[name].state is State.ISSUED]
        assert list(recorded.accepted) == fresh
        assert sorted(recorded.late) == sorted(n for n in names if self.samples[n].state is State.DROPPED)
        assert len(recorded.duplicates) == len(names) - len(fresh) - len(recorded.late)
        for name in fresh:
            self.samples[name].sampled_at = self.version.step
        self.moved(fresh, State.GENERATED)

    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        """In any order, some twice, some for the first time with their tokens, some after they were dropped."""
        self.deliver_and_score(self.pick(data))

    def deliver_and_score(self, names: list[str]) -> None:
        delivered = [self.arrived(name) for name in names]
        recorded = self.do(self.ledger.group_scored(delivered))
        fresh = [name for name in names if self.samples[name].state in (State.ISSUED, State.GENERATED)]
        assert list(recorded.accepted) == fresh
        self.note_scores(fresh)

    def note_scores(self, names: list[str]) -> None:
        for name in names:
            sample = self.samples[name]
            sample.scored = True
            if sample.state is State.ISSUED:
                sample.sampled_at = self.version.step
        self.moved(names, State.SCORED)

    @rule(data=st.data())
    def score_beside_others(self, data: st.DataObject) -> None:
        """Many callers at once, two of them with the same sample."""
        names = self.pick(data)
        open_ = {name for name in names if self.samples[name].state in (State.ISSUED, State.GENERATED)}
        asked = [*names, *names[:1]]

        async def at_once() -> list[Recorded]:
            delivered = [self.arrived(name) for name in asked]
            return await asyncio.gather(*(self.ledger.group_scored([sample]) for sample in delivered))

        accepted = [name for recorded in self.do(at_once()) for name in recorded.accepted]
        assert sorted(accepted) == sorted(open_)
        self.note_scores(accepted)

    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def drop(self, data: st.DataObject, reason: DropReason) -> None:
        names = self.pick(data, *OPEN, State.DROPPED)
        fresh = [name for name in names if self.samples[name].state is not State.DROPPED]
        assert list(self.do(self.ledger.dropped(RUN, names, reason)).accepted) == fresh
        self.moved(fresh, State.DROPPED, reason)

    @precondition(lambda self: not self.ended and self.samples)
    @rule(data=st.data())
    def a_group_counts_for_another_step(self, data: st.DataObject) -> None:
        of = {name: name.rpartition("/")[0] for name in self.samples}
        group = data.draw(st.sampled_from(sorted(set(of.values()))))
        step = self.steps_done + 1
        carried = self.ledger.carry_over(RUN, [group], step)
        names = [name for name in of if of[name] == group]
        if any(self.samples[name].state in (State.CONSUMED, State.DURABLE) for name in names):
            with pytest.raises(FailedPrecondition, match=f"cannot count for step {step}"):
                self.do(carried)
            return
        self.do(carried)
        for name in names:
            self.samples[name].step = step
        steps = {group.group_id: group.step for group in self.do(self.ledger.admitted_groups(RUN, 0))}
        assert steps == {of[name]: sample.step for name, sample in self.samples.items()}

    @precondition(lambda self: not self.ended)
    @rule(steps=st.integers(1, 3), saved=st.booleans())
    def go_on_undisturbed(self, steps: int, saved: bool) -> None:
        """Whole steps, so that a sequence of few rules has something to undo."""
        for _ in range(steps):
            known = set(self.samples)
            self.issue(2, 0)
            names = sorted(set(self.samples) - known)
            self.deliver_and_score(names)
            self.train_on(names)
            if saved:
                self.checkpoint()

    @precondition(lambda self: not self.ended)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        self.train_on(self.pick(data, State.SCORED))

    def train_on(self, names: list[str]) -> None:
        before, result = self.version, Version(self.version.lineage, self.version.step + 1)
        self.steps_done += 1
        for _ in range(2):  # reported twice, as by a coordinator that died in between: trained once
            self.do(self.consume(f"{RUN}/{result}", names, before, result))
        self.updates.append(Update(f"{RUN}/{result}", before.step, tuple(names)))
        self.moved(names, State.CONSUMED)
        self.stale |= {name for name in names if self.samples[name].sampled_at < before.step}
        self.version = result

    async def consume(self, update_id: str, names: list[str], before: Version, result: Version) -> None:
        cursor = {"position": self.steps_done}
        step = self.steps_done
        await self.ledger.consumed(RUN, update_id, names, before, result=result, step=step, cursor=cursor)

    @rule(data=st.data())
    def train_what_cannot_be_trained(self, data: st.DataObject) -> None:
        wrong = [state for state in State if state is not State.SCORED]
        names = self.pick(data, *wrong)
        if names:
            with pytest.raises(FailedPrecondition, match=names[0]):
                self.do(self.consume(f"{RUN}/wrong", names, self.version, self.version))

    @precondition(lambda self: self.updates)
    @rule(data=st.data())
    def train_other_samples_under_a_known_name(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.updates))
        names = [name for name in self.pick(data) if name not in known.samples]
        if names:
            with pytest.raises(FailedPrecondition, match="other samples"):
                self.do(self.consume(known.update_id, names, self.version, self.version))

    @precondition(lambda self: not self.ended)
    @rule()
    def checkpoint(self) -> None:
        """The oldest one that is kept decides what is durable."""
        here = Checkpoint(self.steps_done, self.version.step)
        self.checkpoints = [*(c for c in self.checkpoints if c != here), here][-KEPT_CHECKPOINTS:]
        oldest = self.checkpoints[0]
        version = Version(self.version.lineage, oldest.version_step)
        self.do(self.ledger.covered(RUN, version, oldest.steps_done))
        for update in self.updates:
            if update.started_from < oldest.version_step:
                self.moved(update.samples, State.DURABLE)

    @rule(retry_rewards=st.booleans(), newest_is_damaged=st.booleans())
    def trainer_falls_back(self, retry_rewards: bool, newest_is_damaged: bool) -> None:
        """Fall back to a kept checkpoint, or to the start of a run without one; a run that ended continues so too."""
        kept = self.checkpoints or [Checkpoint(0, 0)]
        there = kept[0] if newest_is_damaged else kept[-1]
        self.checkpoints = [c for c in self.checkpoints if c.steps_done <= there.steps_done]
        self.version = Version(self.version.lineage + 1, there.version_step)
        self.steps_done, self.ended = there.steps_done, False
        voided = self.do(
            self.ledger.fall_back(
                RUN, self.version, step=self.steps_done, cursor=None, retry_rewards=retry_rewards
            )
        )
        undone = [update for update in self.updates if update.started_from >= there.version_step]
        assert [(u.update_id, u.sample_ids) for u in voided] == [(u.update_id, u.samples) for u in undone]
        self.updates = self.updates[: len(self.updates) - len(undone)]
        for update in undone:
            self.moved(update.samples, State.SCORED)
        reasons = {*REOPENED, *(REWARDS_FAILED if retry_rewards else ())}
        for name, sample in self.samples.items():
            if sample.state is State.DROPPED and sample.reason in reasons and sample.step >= self.steps_done:
                # What was too old for its update is drawn again by a newer version.
                sample.scored = sample.scored and sample.reason != DropReason.STALE
                self.moved([name], State.SCORED if sample.scored else State.ISSUED)

    @precondition(lambda self: self.checkpoints and self.checkpoints[0].version_step > 0)
    @rule()
    def trainer_cannot_fall_back_behind_every_checkpoint(self) -> None:
        before = Version(self.version.lineage + 1, self.checkpoints[0].version_step - 1)
        with pytest.raises(FailedPrecondition, match="durable"):
            self.do(self.ledger.fall_back(RUN, before, step=0, cursor=None))

    @rule(reason=st.sampled_from([DropReason.RUN_ENDED, DropReason.RUN_INTERRUPTED]))
    def run_ends(self, reason: DropReason) -> None:
        open_ = [name for name, sample in self.samples.items() if sample.state in OPEN]
        assert self.do(self.ledger.drop_in_flight(RUN, reason)) == len(open_)
        self.do(self.ledger.update_run(RUN, state=RunState.FAILED))
        self.moved(open_, State.DROPPED, reason)
        self.ended = True

    @rule()
    def coordinator_is_killed(self) -> None:
        """Open what a kill would leave: the files as they are, without a closing checkpoint."""
        old, self.lives = self.ledger, self.lives + 1
        folder = self.root / str(self.lives)
        folder.mkdir()
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            shutil.copyfile(old.path.with_name(name), folder / name)
        self.ledger = Ledger.open(folder / "ledger.sqlite")
        old.close()
        shutil.rmtree(old.path.parent)

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        records = {record.sample_id: record for record in self.do(self.ledger.samples(RUN, limit=10**6))}
        assert {name: record.state for name, record in records.items()} == {
            name: sample.state for name, sample in self.samples.items()
        }
        for record in records.values():
            if record.state in (State.GENERATED, State.SCORED, State.CONSUMED):
                assert record.token_ids is not None, f"{record.sample_id} may train and has no tokens"

    @invariant()
    def nothing_is_lost_or_trained_twice(self) -> None:
        verdict = check(self.ledger.path, RUN)
        assert verdict.stale == len(self.stale)
        assert (verdict.lost, verdict.trained_twice, verdict.unexpected) == (0, 0, 0), verdict
        assert verdict.conservation_ok, verdict
        states = Counter(sample.state for sample in self.samples.values())
        counts = counts_of(self.ledger.path, RUN)
        assert counts.holds and counts.admitted == verdict.admitted == len(self.samples)
        assert counts.trained == verdict.trained == states[State.CONSUMED] + states[State.DURABLE]
        assert verdict.dropped == counts.dropped
        assert sum(counts.dropped.values()) == states[State.DROPPED]

    def teardown(self) -> None:
        self.ledger.close()
        self.runner.close()
        shutil.rmtree(self.root)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
