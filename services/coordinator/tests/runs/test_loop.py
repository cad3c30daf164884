"""The training loop against scripted services: what runs at the same time, and what waits for what."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.autoscale import IdleShares
from flotilla_coordinator.fleet.run_fleet import SleepingGenerators
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.loop import run_loop
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.weights.members import SyncReport
from flotilla_coordinator.weights.sync import WeightSync
from flotilla_core.config import RunConfig, StackConfig, WeightSyncConfig
from flotilla_core.errors import FlotillaError, Mismatch, RankFailed
from flotilla_core.service import Activities
from flotilla_core.version import Version
from flotilla_testing.scripted import scripted_generator, scripted_trainer

pytestmark = pytest.mark.usefixtures("direct_calls")

STEPS = 3
LIMIT_S = 5.0
START = Version(0, 0)
TURNS = 50
"""Turns of the event loop, in which everything that waits for nothing has been done."""
CONFIG = RunConfig.model_validate(
    {
        "name": "run",
        "steps": STEPS,
        "data": {"train": "x.jsonl"},
        "rewards": [{"reward": "exact"}],
        "export_final": False,
    }
)


@dataclass
class Policy:
    """The session of the policy: each update makes the next version."""

    version: Version = START
    stub: Any = field(default_factory=scripted_trainer)


class Loop:
    """A run with a real weight sync whose live checks a test holds open; the rest notes what it did."""

    def __init__(self, staleness: int = 0) -> None:
        self.staleness = staleness
        self.done: list[str] = []
        self.may_pass = asyncio.Event()
        self.may_pass.set()
        self.may_record = asyncio.Event()
        self.may_record.set()
        self.mismatch: Mismatch | None = None
        self.policy = Policy()
        self.generator: Any = scripted_generator("a")
        generator = self.generator
        policy: Any = self.policy

        async def candidates() -> list[Any]:
            return [generator]

        self.sync = WeightSync(
            "run",
            WeightSyncConfig(),
            backend="gloo",
            policy=policy,
            candidates=candidates,
            ready=lambda: [generator],
            evict=lambda gone, error: self.done.append(f"evicted {gone.name}: {error}"),
            record=lambda report: report.record_in(self.run.metrics),
            verify=self._verify,
        )
        nobody: Any = None
        self.run = RunContext(
            run_id="run",
            config=CONFIG,
            stack=StackConfig(),
            control=RunControl(CONFIG),
            learners=SimpleNamespace(  # type: ignore[arg-type]
                policy=policy, judges={}, on_shared_gpus=False, open=self._open, train=self._train
            ),
            source=SimpleNamespace(samples_from_policy=True, admit=self._admit, batch=self._batch),  # type: ignore[arg-type]
            sync=self.sync,
            evaluator=None,
            checkpoints=SimpleNamespace(  # type: ignore[arg-type]
                due=lambda _: False, writing=False, copying=False, wanted=False, full=None, take_metrics=dict
            ),
            ledger=SimpleNamespace(backlog=0, lost=False),  # type: ignore[arg-type]
            directory=SimpleNamespace(write_metrics=self._write_metrics),  # type: ignore[arg-type]
            status=RunStatus(run_pb2.Run(run_id="run"), EventLog(lambda event: None)),
            activities=Activities(),
            idle=IdleShares(list),
            pinned=nobody,
        )
        self.run.record_update = self._record  # type: ignore[method-assign]
        self.metrics: list[dict[str, float]] = []

    async def _verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        await self.may_pass.wait()
        if self.mismatch is not None:
            raise self.mismatch
        self.run.canary_figures["canary/mean"] = float(report.version.step)
        self.done.append(f"checked {report.version.step}")
        return {}

    async def _open(self) -> None:
        self.done.append("opened")

    def _admit(self, step: int, version: Version) -> None:
        self.done.append(f"admitted {step}")

    async def _batch(self, step: int, version: Version) -> Any:
        """Sample with the oldest version that the bound allows; pass a batch on when that version is proved."""
        oldest = Version(0, max(0, step - self.staleness))
        assert self.sync.serving.serves("a-1", oldest)
        self.done.append(f"sampled {step}")
        await self.sync.wait_until_verified(oldest)
        return SimpleNamespace(step=step)

    async def _train(self, batch: Any) -> Any:
        assert not self.sync.checking, "the live check compares with weights that an update would change"
        self.done.append(f"trained {batch.step}")
        self.policy.version = Version(0, batch.step + 1)
        return SimpleNamespace()

    async def _record(self, step: int, version: Version, batch: Any, updates: Any) -> None:
        await self.may_record.wait()
        self.done.append(f"recorded {step}")
        self.run.steps_recorded = step + 1

    def _write_metrics(self, step: int, metrics: dict[str, float], lineage: int) -> None:
        self.metrics.append(dict(metrics))

    def begin(self) -> asyncio.Task[None]:
        self.run.control.config = CONFIG
        return asyncio.create_task(run_loop(self.run, StartPoint()))

    def sleep_meanwhile(self) -> None:
        """Have the generator sleep during updates; its calls are noted among what was done."""
        stub = self.generator.stub
        self.run.sleeping_generators = SleepingGenerators(
            "run", lambda: [self.generator], lambda *_: None, self.done.append
        )
        for method in ("Sleep", "Wake"):
            call = getattr(stub, method)

            async def noted(request: Any, call: Any = call, method: str = method) -> Any:
                self.done.append(method)
                return await call(request)

            setattr(stub, method, noted)

    async def until(self, did: str) -> None:
        """Return in the turn of the event loop in which this was done."""
        async with asyncio.timeout(LIMIT_S):
            while did not in self.done:
                await asyncio.sleep(0)

    async def idle(self) -> None:
        """Return when everything was done that waits for nothing."""
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def test_rollouts_proceed_while_the_canary_is_held_open_and_nothing_of_theirs_is_trained() -> None:
    loop = Loop()
    running = loop.begin()
    await loop.until("trained 0")
    loop.may_pass.clear()
    await loop.until("sampled 1")
    await loop.idle()
    assert loop.sync.checking and "trained 1" not in loop.done
    assert loop.done[-2:] == ["admitted 1", "sampled 1"]
    loop.may_pass.set()
    async with asyncio.timeout(LIMIT_S):
        await running
    assert [did for did in loop.done if did.startswith("trained")] == ["trained 0", "trained 1", "trained 2"]
    assert [did for did in loop.done if did.startswith("checked")] == [
        f"checked {n}" for n in range(STEPS + 1)
    ]


async def test_a_batch_that_is_ready_waits_for_the_canary_in_a_phase_that_says_so() -> None:
    loop = Loop(staleness=1)
    loop.may_pass.clear()
    running = loop.begin()
    await loop.until("sampled 0")
    loop.may_pass.set()
    await loop.until("trained 0")
    loop.may_pass.clear()
    await loop.until("sampled 1")
    await loop.idle()
    assert loop.run.status.run.phase == "wait for the canary" and "trained 1" not in loop.done
    loop.may_pass.set()
    async with asyncio.timeout(LIMIT_S):
        await running
    assert "time/wait_for_the_canary_s" in loop.metrics[1]
    assert [step["canary/mean"] for step in loop.metrics] == [0.0, 1.0, 2.0], (
        "of the version that it trains from"
    )
    assert [step["sync/members"] for step in loop.metrics] == [1, 1, 1], "also where the canary goes on"


async def test_a_canary_that_fails_ends_the_run_before_anything_of_that_version_is_trained() -> None:
    loop = Loop()
    running = loop.begin()
    await loop.until("trained 0")
    loop.may_pass.clear()
    await loop.until("sampled 1")
    loop.mismatch = Mismatch("the token probabilities of a differ from the trainer's by 0.5")
    loop.may_pass.set()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(Mismatch, match="differ from the trainer's by"):
            await running
    assert "trained 1" not in loop.done


async def test_the_last_version_is_checked_before_the_run_ends() -> None:
    loop = Loop()
    running = loop.begin()
    await loop.until("trained 2")
    loop.may_pass.clear()
    await loop.until("recorded 2")
    await loop.idle()
    assert not running.done()
    loop.mismatch = Mismatch("the token probabilities of a differ from the trainer's by 0.5")
    loop.may_pass.set()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(Mismatch):
            await running


async def test_an_update_is_recorded_while_its_version_is_sent_and_before_anything_follows() -> None:
    loop = Loop()
    loop.may_record.clear()
    running = loop.begin()
    await loop.until("checked 1")
    await loop.idle()
    assert loop.sync.version == Version(0, 1) and "recorded 0" not in loop.done
    assert loop.run.steps_done == 0 and "admitted 1" not in loop.done
    loop.may_record.set()
    async with asyncio.timeout(LIMIT_S):
        await running
    assert loop.done.index("recorded 0") < loop.done.index("admitted 1")


async def test_an_update_is_recorded_also_where_its_version_cannot_be_sent() -> None:
    loop = Loop()
    loop.may_record.clear()
    loop.policy.stub.failures["PublishWeights"] = [None, RankFailed("rank 0 was killed")]
    running = loop.begin()
    await loop.until("trained 0")
    await loop.idle()
    assert not running.done()
    loop.may_record.set()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RankFailed, match="rank 0 was killed"):
            await running
    assert "recorded 0" in loop.done
    assert loop.run.steps_done == loop.run.status.run.step == 1 and "time/train_s" in loop.metrics[0]


async def test_a_step_that_is_stopped_after_its_record_has_its_metrics() -> None:
    loop, saving = Loop(), asyncio.Event()

    async def save(_progress: Any) -> None:
        saving.set()
        await asyncio.Event().wait()

    loop.run.checkpoints.due = lambda steps_done: steps_done == 2  # type: ignore[method-assign]
    loop.run.checkpoints.save = save  # type: ignore[method-assign, assignment]
    running = loop.begin()
    async with asyncio.timeout(LIMIT_S):
        await saving.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(loop.metrics) == loop.run.steps_done == loop.run.status.run.step == 2
    assert "time/checkpoint_s" in loop.metrics[1]


async def test_a_step_that_is_stopped_before_its_record_has_no_metrics() -> None:
    loop = Loop()
    loop.may_record.clear()
    running = loop.begin()
    await loop.until("trained 0")
    running.cancel()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert loop.metrics == [] and loop.run.steps_done == 0


async def test_generators_sleep_during_updates_alone_where_the_stack_says_so() -> None:
    loop = Loop()
    loop.sleep_meanwhile()
    loop.may_pass.clear()
    running = loop.begin()
    await loop.until("sampled 0")
    await loop.idle()
    assert "Sleep" not in loop.done, "the live check decodes"
    loop.may_pass.set()
    async with asyncio.timeout(LIMIT_S):
        await running
    for step in range(STEPS):
        trained = loop.done.index(f"trained {step}")
        assert loop.done[trained - 1 : trained + 2] == ["Sleep", f"trained {step}", "Wake"]
    assert loop.done.count("Sleep") == loop.done.count("Wake") == STEPS
    assert all(step["time/sleep_s"] >= 0 and step["time/wake_s"] >= 0 for step in loop.metrics)


async def test_an_update_that_fails_leaves_the_waking_to_the_next_weight_group() -> None:
    loop = Loop()
    loop.sleep_meanwhile()

    async def killed(batch: Any) -> Any:
        raise RankFailed("rank 0 was killed")

    loop.run.learners.train = killed  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RankFailed):
            await loop.begin()
    assert (
        loop.done[-1] == "Sleep"
        and loop.run.sleeping_generators is not None
        and loop.run.sleeping_generators.sleeps("a-1")
    )


async def test_without_the_key_no_generator_is_ever_asked_to_sleep() -> None:
    loop = Loop()
    async with asyncio.timeout(LIMIT_S):
        await loop.begin()
    assert not loop.generator.stub.asked("Sleep") and not loop.generator.stub.asked("Wake")
    assert not any("time/sleep_s" in step for step in loop.metrics)
