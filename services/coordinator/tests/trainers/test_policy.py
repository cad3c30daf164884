"""The trainer as the loop sees it: nothing is trained twice, and a dead run does not keep the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.trainers import session
from flotilla_coordinator.trainers.learners import SessionFactory
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.trainers.session import Gang
from flotilla_coordinator.trainers.spec import session_spec
from flotilla_core import rpc
from flotilla_core.agreement import Rounding, agreement_limits
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.config.algorithm import CorrectionConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, Mismatch, NotFound, Unavailable
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.files import NO_FILES, files_in, to_nobody

pytestmark = pytest.mark.usefixtures("direct_calls")

CONFIG = RunConfig.model_validate(
    {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
)

LONGEST_S = 700.0


class Trainer:
    """One session, by the rules of the contract; streams break as often as a test says."""

    def __init__(self) -> None:
        self.holder = ""
        self.lineage = 0
        self.version = Version(0, 0)
        self.updates: dict[str, pb.UpdateResult] = {}
        self.breaks_before: int = 0
        self.breaks_after: int = 0
        self.lost = False

    async def OpenSession(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        if self.holder:
            raise FailedPrecondition(f"run {self.holder} holds the trainer")
        self.holder, self.lineage = request.run_id, request.lineage
        return pb.OpenSessionResponse(
            policy_version=self.version.to_proto(), max_sequence_tokens=512, vocabulary=99
        )

    async def CloseSession(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        if request.run_id == self.holder:
            self.holder = ""
        return pb.CloseSessionResponse()

    async def Train(self, requests: AsyncIterable[pb.TrainRequest]) -> pb.TrainResponse:
        header, *chunks = [request async for request in requests]
        if self.breaks_before:
            self.breaks_before -= 1
            raise Unavailable("the stream broke before the batch was there")
        assert len(chunks) == 1 and header.header.groups == 1
        assert header.header.update_id not in self.updates, "trained twice"
        self.version = Version(0, self.version.step + 1)
        result = pb.UpdateResult(update_id=header.header.update_id, policy_version=self.version.to_proto())
        self.updates[result.update_id] = result
        if self.breaks_after:
            self.breaks_after -= 1
            raise Unavailable("the stream broke after the step")
        return pb.TrainResponse(result=result)

    async def GetSession(self, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
        if self.lost or request.run_id != self.holder:
            raise FailedPrecondition("run has no session")
        return pb.GetSessionResponse(
            policy_version=self.version.to_proto(), max_sequence_tokens=512, vocabulary=99
        )

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest) -> pb.LoadCheckpointResponse:
        self.version = Version(self.lineage, 3)
        return pb.LoadCheckpointResponse(policy_version=self.version.to_proto(), coordinator_state=b"{}")

    async def GetUpdate(self, request: pb.GetUpdateRequest) -> pb.GetUpdateResponse:
        if self.lost:
            raise FailedPrecondition("run has no session")
        if request.update_id not in self.updates:
            raise NotFound("never happened here")
        return pb.GetUpdateResponse(result=self.updates[request.update_id])


def policy(trainer: Trainer, *ended: str, lineage: int = 0) -> PolicyTrainer:
    async def ended_runs() -> list[str]:
        return list(ended)

    stub: Any = trainer
    gang = Gang("policy", stub, "trainer-0-1", LONGEST_S, "trainer", NO_FILES, None, to_nobody)
    return PolicyTrainer("run", session_spec(CONFIG, Path("dumps")), gang, ended_runs, lineage)


def batch(tokens_of_response: int = 3) -> Batch:
    tokens = np.arange(tokens_of_response, dtype=np.int32)
    sample = RolloutSample("run/0/0/0", tokens, np.zeros(tokens.size, dtype=np.float32), "text")
    return Batch(0, [RolloutGroup("run/0/0", "prompt", tokens, [sample])], {})


async def test_a_trainer_held_by_a_run_that_has_ended_is_taken_back() -> None:
    trainer = Trainer()
    trainer.holder = "killed"
    await policy(trainer, "older", "killed").open()
    assert trainer.holder == "run"


async def test_a_session_that_is_found_has_the_limits_of_the_model_as_one_that_was_opened() -> None:
    trainer = Trainer()
    opened, attached = policy(trainer), policy(trainer)
    await opened.open()
    found = await attached.left()
    assert found is not None
    attached.attach(found)
    for one in (opened, attached):
        assert (one.opened, one.longest_sequence, one.vocabulary) == (True, 512, 99)


async def test_a_trainer_is_taken_back_from_every_run_of_the_ledger_however_old(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.holder = "long-ago"
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    for run_id in ("long-ago", *(f"later-{number}" for number in range(200))):
        await ledger.save_run(RunRecord(run_id, "run", RunState.FAILED, "", "", 1.0))

    async def gang(role: str, patience_s: float) -> Any:
        registration = SimpleNamespace(tokenizer_digest="")
        return SimpleNamespace(
            stub=trainer, channel=None, instance_id="trainer-1", name="trainer", registration=registration
        )

    fleet: Any = SimpleNamespace(gang=gang)
    tokenizer: Any = None
    gangs = SessionFactory(
        "run",
        stack=StackConfig(model=tmp_path),
        fleet=fleet,
        ledger=ledger,
        lineage=0,
        files=files_in(tmp_path),
        tell=to_nobody,
    )
    learners = await gangs.learners(CONFIG, tokenizer, tmp_path)
    await learners.open()
    assert trainer.holder == "run"
    ledger.close()


async def test_waiting_for_a_close_outlasts_the_longest_command(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    async def call(method: Any, request: Any, *, timeout_s: float, **_options: Any) -> Any:
        limits[method.__name__] = timeout_s
        return await method(request)

    monkeypatch.setattr(rpc, "unary", call)
    client = policy(Trainer())
    await client.open()
    await client.close()
    # The session that opens waits for the one that closes.
    assert LONGEST_S < limits["CloseSession"] < limits["OpenSession"]


async def test_a_run_that_goes_on_takes_its_own_old_session_back() -> None:
    trainer = Trainer()
    trainer.holder = "run"
    client = policy(trainer, lineage=2)
    await client.open()
    assert trainer.holder == "run" and trainer.lineage == 2
    assert await client.load(Path("/run/checkpoints/step-000003")) == b"{}"
    assert client.version == Version(2, 3)


class Rounding16(Trainer):
    """A trainer whose half precision is `off` away from float32 on the tokens of rollouts, which differ by 0.03."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off
        self.limits: list[float] = []
        self.scored = 0

    async def Train(self, requests: AsyncIterable[pb.TrainRequest]) -> pb.TrainResponse:
        header, *chunks = [request async for request in requests]
        self.limits.append(header.header.refuse_above)
        if header.header.refuse_above < 0.03:
            raise Mismatch("the probabilities of one version differ between generator and trainer")

        async def again() -> AsyncIterator[pb.TrainRequest]:
            for request in (header, *chunks):
                yield request

        return await super().Train(again())

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        assert request.temperature == 0.5
        self.scored += 1
        response = pb.ComputeLogprobsResponse()
        for asked in request.sequences:
            probability = 0.5 + (0.0 if request.in_float32 else self.off)
            logprobs = np.full(from_tensor(asked.token_ids).size, np.log(probability), dtype=np.float32)
            response.sequences.add(sequence_id=asked.sequence_id, logprobs=to_tensor(logprobs))
        return response


def limits_of_bfloat16(trainer: Trainer) -> PolicyTrainer:
    client = policy(trainer)
    stack, section = StackConfig(model=Path("m")), CorrectionConfig()
    stack = stack.model_copy(update={"trainer": stack.trainer.model_copy(update={"dtype": "bfloat16"})})

    def measured(rounding: Rounding | None) -> None:
        client.agreement = agreement_limits(stack, section, rounding)

    measured(None)
    client.measured, client.temperature = measured, 0.5
    return client


async def test_a_batch_whose_own_tokens_round_as_much_is_trained_after_a_second_look() -> None:
    trainer = Rounding16(0.02)
    client = limits_of_bfloat16(trainer)
    await client.open()
    await client.train(batch(256))
    assert trainer.limits == [0.016, pytest.approx(2 * 2**0.5 * 0.02, rel=1e-3)]
    assert list(trainer.updates) == ["run/0.1"]


async def test_a_batch_that_rounding_does_not_explain_is_refused_for_good() -> None:
    trainer = Rounding16(0.005)
    client = limits_of_bfloat16(trainer)
    await client.open()
    with pytest.raises(Mismatch, match="differ between generator and trainer"):
        await client.train(batch(256))
    assert trainer.scored == 2 and trainer.limits == [0.016] and not trainer.updates


async def test_a_limit_that_the_run_sets_is_not_looked_at_twice() -> None:
    trainer = Rounding16(0.02)
    client = limits_of_bfloat16(trainer)
    client.measured = None
    await client.open()
    with pytest.raises(Mismatch, match="differ between generator and trainer"):
        await client.train(batch(256))
    assert not trainer.scored


async def test_few_tokens_say_nothing_about_rounding() -> None:
    trainer = Rounding16(0.02)
    client = limits_of_bfloat16(trainer)
    await client.open()
    with pytest.raises(Mismatch, match="differ between generator and trainer"):
        await client.train(batch(255))
    assert not trainer.scored


async def test_a_session_is_lost_when_the_trainer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PROBE_EVERY_S", 0.0)
    trainer = Trainer()
    client = policy(trainer)
    assert not client.opened
    await client.open()
    assert client.opened and not await client.lost()
    trainer.lost = True
    assert await client.lost()


async def test_a_trainer_held_by_anybody_else_is_refused() -> None:
    trainer = Trainer()
    trainer.holder = "somebody"
    with pytest.raises(FailedPrecondition, match="run somebody holds the trainer"):
        await policy(trainer, "older").open()
    assert trainer.holder == "somebody"


@pytest.mark.parametrize("phase", ["breaks_before", "breaks_after"])
async def test_a_broken_stream_trains_once(phase: str) -> None:
    trainer = Trainer()
    setattr(trainer, phase, 1)
    client = policy(trainer)
    await client.train(batch())
    assert client.version == trainer.version == Version(0, 1) and len(trainer.updates) == 1


async def test_a_stream_that_breaks_again_and_again_ends_named() -> None:
    trainer = Trainer()
    trainer.breaks_before = 100
    with pytest.raises(Unavailable, match="the stream broke before"):
        await policy(trainer).train(batch())
    assert trainer.version == Version(0, 0)


async def test_a_lost_session_is_called_by_its_name() -> None:
    trainer = Trainer()
    trainer.breaks_before, trainer.lost = 1, True
    with pytest.raises(FlotillaError, match="its session is gone"):
        await policy(trainer).train(batch())
