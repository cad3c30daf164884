"""Whatever happens to the coordinator, what the ledger acknowledged is there and nothing was trained twice."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import GroupIssue, RunRecord, RunState, ScoredSample, TokenSpan
from flotilla_core.errors import FailedPrecondition
from flotilla_core.version import Version

RUN = "chaos-20260314-0915-7f3a"
TOKENS = np.array([1, 2], dtype=np.int32)
LOGPROBS = np.zeros(2, dtype=np.float32)


def scored(sample_id: str, version: Version) -> ScoredSample:
    return ScoredSample(
        sample_id, 0, "generator-0", TOKENS, LOGPROBS, "", (TokenSpan(version, 0, 2),), False, 1.0
    )


class LedgerUnderChaos(RuleBasedStateMachine):
    """A run whose deliveries repeat, arrive late, and whose coordinator and trainer die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.lives = 0
        self.ledger = Ledger.open(self.root / "0" / "ledger.sqlite")
        self.do(self.ledger.save_run(RunRecord(RUN, "chaos", RunState.RUNNING, "{}", "", time.time())))
        self.states: dict[str, str] = {}
        self.sampled_at: dict[str, int] = {}
        self.stale: set[str] = set()
        self.updates: list[tuple[str, int, list[str]]] = []
        self.durable_updates = 0
        self.version = Version(0, 0)
        self.groups = 0

    def do(self, operation):  # type: ignore[no-untyped-def]
        return self.runner.run(_await(operation))

    def pick(self, data: st.DataObject, *states: str) -> list[str]:
        known = sorted(sample for sample, state in self.states.items() if not states or state in states)
        return data.draw(st.lists(st.sampled_from(known), unique=True, max_size=6)) if known else []

    @rule(size=st.integers(1, 4))
    def admit(self, size: int) -> None:
        group_id = f"{RUN}/0/{self.groups}"
        self.groups += 1
        samples = tuple(f"{group_id}/{index}" for index in range(size))
        issue = GroupIssue(RUN, group_id, samples, self.version.step, 0, "", TOKENS)
        for _ in range(2):  # asked for twice: admitted once
            self.do(self.ledger.group_issued(issue))
        self.states |= dict.fromkeys(samples, "issued")

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        samples = self.pick(data)
        recorded = self.do(self.ledger.group_scored([scored(sample, self.version) for sample in samples]))
        assert sorted(recorded.accepted) == sorted(s for s in samples if self.states[s] == "issued")
        assert sorted(recorded.late) == sorted(s for s in samples if self.states[s] == "dropped")
        self.states |= dict.fromkeys(recorded.accepted, "scored")
        self.sampled_at |= dict.fromkeys(recorded.accepted, self.version.step)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        samples = self.pick(data, "issued", "scored", "dropped")
        self.do(self.ledger.dropped(RUN, samples, "tired"))
        self.states |= dict.fromkeys(samples, "dropped")

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        samples = self.pick(data, "scored")
        result = Version(self.version.lineage, self.version.step + 1)
        update_id = f"{RUN}/{result}"
        for _ in range(2):  # reported twice: trained once
            self.do(
                self.ledger.consumed(
                    RUN, update_id, samples, self.version, result=result, step=result.step, cursor=None
                )
            )
        self.updates.append((update_id, self.version.step, samples))
        self.states |= dict.fromkeys(samples, "trained")
        self.stale |= {sample for sample in samples if self.sampled_at[sample] < self.version.step}
        self.version = result

    @rule(data=st.data())
    def train_what_cannot_be_trained(self, data: st.DataObject) -> None:
        samples = self.pick(data, "issued", "trained", "dropped")
        if not samples:
            return
        try:
            self.do(
                self.ledger.consumed(
                    RUN, f"{RUN}/wrong", samples, self.version, result=self.version, step=0, cursor=None
                )
            )
        except FailedPrecondition as refused:
            assert samples[0] in str(refused)
        else:
            raise AssertionError(f"trained {samples}")

    @precondition(lambda self: len(self.updates) > self.durable_updates)
    @rule()
    def checkpoint(self) -> None:
        self.do(self.ledger.durable(RUN, [update_id for update_id, _, _ in self.updates]))
        self.durable_updates = len(self.updates)

    @precondition(lambda self: len(self.updates) > self.durable_updates)
    @rule(data=st.data())
    def trainer_falls_back(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(self.durable_updates, len(self.updates) - 1))
        step = self.updates[keep][1]
        voided = self.do(self.ledger.void_updates(RUN, Version(self.version.lineage, step)))
        assert [list(update.sample_ids) for update in voided] == [
            samples for _, _, samples in self.updates[keep:]
        ]
        for _, _, samples in self.updates[keep:]:
            self.states |= dict.fromkeys(samples, "scored")
        del self.updates[keep:]
        self.version = Version(self.version.lineage + 1, step)

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
    def nothing_is_lost_or_trained_twice(self) -> None:
        counts = self.do(self.ledger.counts(RUN))
        states = list(self.states.values())
        assert counts.holds
        assert counts.admitted == len(states)
        assert counts.trained == states.count("trained")
        assert sum(counts.dropped.values()) == states.count("dropped")

    def teardown(self) -> None:
        self.ledger.close()
        verdict = check(self.ledger.path, RUN)
        assert (verdict.lost, verdict.trained_twice, verdict.unexpected) == (0, 0, 0), verdict
        assert verdict.conservation_ok, verdict
        assert verdict.stale == len(self.stale)
        assert verdict.trained == list(self.states.values()).count("trained")
        self.runner.close()
        shutil.rmtree(self.root)


async def _await(operation):  # type: ignore[no-untyped-def]
    return await operation


TestLedgerUnderChaos = LedgerUnderChaos.TestCase
TestLedgerUnderChaos.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)

WRITE_UNTIL_KILLED = """
import asyncio, sys, time
import numpy as np
from pathlib import Path
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import GroupIssue, RunRecord, RunState

RUN = sys.argv[2]

async def main():
    ledger = Ledger.open(Path(sys.argv[1]))
    await ledger.save_run(RunRecord(RUN, "chaos", RunState.RUNNING, "{}", "", time.time()))
    async def write(worker):
        for number in range(10**9):
            group = f"{RUN}/{worker}/{number}"
            await ledger.group_issued(GroupIssue(RUN, group, (group + "/0",), 0, 0, "", np.zeros(1, np.int32)))
            print(group + "/0", flush=True)
    await asyncio.gather(*(write(worker) for worker in range(8)))

asyncio.run(main())
"""


def test_whatever_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path), RUN], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    acknowledged = {child.stdout.readline().strip() for _ in range(200)}
    child.kill()
    acknowledged |= {line.strip() for line in child.stdout if line.endswith("\n")}
    child.wait(timeout=10)
    kept = asyncio.run(_sample_ids(path))
    assert len(acknowledged) >= 200
    assert acknowledged <= kept
    assert check(path, RUN).passed


async def _sample_ids(path: Path) -> set[str]:
    ledger = Ledger.open(path)
    records = await ledger.samples(RUN, limit=10**6)
    ledger.close()
    return {record.sample_id for record in records}
