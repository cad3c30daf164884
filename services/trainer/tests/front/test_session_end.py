"""A session that has ended leaves the ranks to the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import StackConfig
from flotilla_core.errors import (
    Cancelled,
    Damaged,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_testing.files import files_in
from flotilla_testing.session_specs import as_struct, gang_facts, wire_objective
from flotilla_trainer.front.session import Session
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.front.session_manager import SessionManager
from flotilla_trainer.front.session_settings import session_settings
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.frames import Frame

LIMIT_S = 10.0
TOKENS = np.array([3, 4, 5], np.int32)
HEADER = pb.TrainHeader(run_id="a", update_id="a/0.1", groups=1)


class RecordingGang:
    """Takes every command; scores when the gate opens, opens sessions unless it is kept from it."""

    size = lanes = lane_width = 1
    slow_timeout_s = LIMIT_S

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.fields: dict[str, dict[str, Any]] = {}
        self.scoring, self.gate = asyncio.Event(), asyncio.Event()
        self.opening, self.opens = asyncio.Event(), asyncio.Event()
        self.opens.set()
        self.facts = gang_facts()

    async def wait_ready(self) -> None:
        """Always ready."""

    async def load(self, folder: Path, head: str, *, frozen: bool) -> None:
        """Return at once."""

    def phases(self) -> list[str]:
        return ["rank 0: scoring"]

    async def command(self, kind: str, fields: Any = None, *arguments: Any, **options: Any) -> list[Frame]:
        self.commands.append(kind)
        self.fields[kind] = fields
        if kind == "open_session":
            self.opening.set()
            await self.opens.wait()
        if kind == "score":
            self.scoring.set()
            await self.gate.wait()
        return [Frame(kind, 0, {"fits": 64}, {"logprobs": np.zeros(len(TOKENS), np.float32)})]


def groups() -> list[pb.TrainGroup]:
    sample = pb.TrainSample(
        sample_id="s",
        token_ids=to_tensor(TOKENS),
        logprobs=to_tensor(np.full(3, -1.0, np.float32)),
        reward=1.0,
    )
    return [
        pb.TrainGroup(group_id="g", prompt_token_ids=to_tensor(np.array([1], np.int32)), samples=[sample])
    ]


def specification() -> session_pb2.SessionSpec:
    section = {
        "type": "reinforce",
        "aggregation": {"type": "token_mean"},
        "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.1},
    }
    return session_pb2.SessionSpec(
        objective=wire_objective("policy", section),
        optimizer=as_struct({"learning_rate": 0.1, "schedule": "constant"}),
        batching=as_struct({"tokens_per_microbatch": 64, "logprob_chunk_tokens": 8}),
        total_updates=4,
    )


async def no_other_host(path: Path, *, sealed: bool, run_id: str) -> None:
    """Bring nothing: the gang is on one host."""


def session_files(folder: Path) -> SessionFiles:
    return SessionFiles(files_in(folder), folder / "remote-runs", no_other_host)


@pytest.fixture
def gang() -> RecordingGang:
    return RecordingGang()


@pytest.fixture
def manager(gang: RecordingGang, tmp_path: Path) -> SessionManager:
    stack = StackConfig(model=tmp_path)
    plan = GangPlan.of_stack(stack, "trainer-0", "trainer-0-test", tmp_path, tmp_path)
    made = SessionManager(cast(Gang, gang), plan, stack, Activities(), session_files(tmp_path))
    request = request_of("a")
    made._session = Session(request, session_settings(request.spec), tmp_path, cast(Gang, gang), Activities())
    (tmp_path / "config.json").write_text("{}", "utf-8")
    return made


def request_of(run_id: str, lineage: int = 0) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(run_id=run_id, lineage=lineage, spec=specification())


async def training(manager: SessionManager, gang: RecordingGang) -> asyncio.Task[pb.UpdateResult]:
    """An update that scores with the reference."""
    update = asyncio.create_task(manager.session("a").updates.train(HEADER, groups()))
    await asyncio.wait_for(gang.scoring.wait(), LIMIT_S)
    return update


def closing(manager: SessionManager) -> asyncio.Task[None]:
    return asyncio.create_task(manager.close("a"))


async def test_the_update_of_a_closed_session_never_reaches_the_ranks(
    manager: SessionManager, gang: RecordingGang
) -> None:
    update, close = await training(manager, gang), closing(manager)
    await asyncio.sleep(0)
    assert not close.done() and manager.session("a").run_id == "a"
    gang.gate.set()
    await asyncio.wait_for(close, LIMIT_S)
    with pytest.raises(Cancelled, match="run a closed its session"):
        await update
    assert gang.commands == ["score"]
    with pytest.raises(FailedPrecondition, match="run a closed it"):
        manager.session("a")


async def test_a_close_whose_caller_goes_away_comes_to_its_end(
    manager: SessionManager, gang: RecordingGang
) -> None:
    update, first = await training(manager, gang), closing(manager)
    await asyncio.sleep(0)
    first.cancel()
    again = closing(manager)
    gang.gate.set()
    await asyncio.wait_for(again, LIMIT_S)
    with pytest.raises(Cancelled):
        await update


async def test_a_session_that_is_closing_keeps_the_next_one_waiting_until_it_is_done(
    manager: SessionManager, gang: RecordingGang
) -> None:
    update, close = await training(manager, gang), closing(manager)
    await asyncio.sleep(0)
    opening = asyncio.create_task(manager.open(request_of("b")))
    done, _ = await asyncio.wait({opening}, timeout=0)
    assert not done and gang.commands == ["score"]
    gang.gate.set()
    await asyncio.wait_for(opening, LIMIT_S)
    assert close.done() and gang.commands == ["score", "open_session"]
    assert manager.session("b").run_id == "b"
    with pytest.raises(Cancelled):
        await update


async def test_a_session_whose_close_was_given_up_can_be_closed_again(
    manager: SessionManager, gang: RecordingGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = await training(manager, gang)
    monkeypatch.setattr(gang, "slow_timeout_s", 0.0)
    with pytest.raises(DeadlineExceeded, match="cannot be closed"):
        await manager.close("a")
    with pytest.raises(FailedPrecondition, match="run a holds the trainer"):
        await manager.open(request_of("b"))
    monkeypatch.setattr(gang, "slow_timeout_s", LIMIT_S)
    gang.gate.set()
    await asyncio.wait_for(manager.close("a"), LIMIT_S)
    await asyncio.wait_for(manager.open(request_of("b")), LIMIT_S)
    with pytest.raises(Cancelled):
        await update


async def test_the_update_of_a_lost_session_never_reaches_the_next_gang(
    manager: SessionManager, gang: RecordingGang
) -> None:
    update = await training(manager, gang)
    manager.gang_lost(Unavailable("rank 0 died"))
    gang.gate.set()
    with pytest.raises(Unavailable, match="rank 0 died"):
        await asyncio.wait_for(update, LIMIT_S)
    assert gang.commands == ["score"]


async def test_a_lost_session_publishes_no_checkpoint_after_its_close(manager: SessionManager) -> None:
    writing = asyncio.create_task(asyncio.Event().wait())
    manager.checkpoints._writing = cast(Any, writing)
    manager.gang_lost(Unavailable("rank 0 died"))
    await asyncio.wait_for(manager.close("a"), LIMIT_S)
    assert writing.cancelled()


async def left_opening(manager: SessionManager, gang: RecordingGang) -> asyncio.Task[pb.OpenSessionResponse]:
    """Start an opening that continues after its caller is gone."""
    manager._session = None
    gang.opens.clear()
    opening = asyncio.create_task(manager.open(request_of("a")))
    await asyncio.wait_for(gang.opening.wait(), LIMIT_S)
    return opening


async def test_after_the_close_of_a_session_that_was_opening_the_next_one_opens(
    manager: SessionManager, gang: RecordingGang
) -> None:
    opening = await left_opening(manager, gang)
    again = request_of("a", lineage=1)
    with pytest.raises(FailedPrecondition, match="run a holds the trainer"):
        await manager.open(again)
    close = closing(manager)
    done, _ = await asyncio.wait({close}, timeout=0)
    assert not done
    gang.opens.set()
    await asyncio.wait_for(close, LIMIT_S)
    reply = await asyncio.wait_for(manager.open(again), LIMIT_S)
    assert reply.policy_version.lineage == 1
    with pytest.raises(Cancelled, match="before it was open"):
        await opening
    assert manager.session("a").version.lineage == 1, "the one that was given up left the next one alone"


async def test_a_close_says_so_when_the_opening_does_not_end(
    manager: SessionManager, gang: RecordingGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = await left_opening(manager, gang)
    monkeypatch.setattr(gang, "slow_timeout_s", 0.0)
    with pytest.raises(DeadlineExceeded, match="opening cannot be closed"):
        await manager.close("a")
    monkeypatch.setattr(gang, "slow_timeout_s", LIMIT_S)
    again = closing(manager)
    gang.opens.set()
    await asyncio.wait_for(again, LIMIT_S)
    with pytest.raises(Cancelled):
        await opening
    with pytest.raises(FailedPrecondition, match="has no session"):
        manager.session("a")


async def test_a_close_ends_with_an_opening_that_fails(
    manager: SessionManager, gang: RecordingGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_rank(*_: Any, **__: Any) -> list[Frame]:
        gang.opening.set()
        await gang.opens.wait()
        raise Unavailable("rank 0 died")

    monkeypatch.setattr(gang, "command", no_rank)
    opening = await left_opening(manager, gang)
    close = closing(manager)
    gang.opens.set()
    await asyncio.wait_for(close, LIMIT_S)
    with pytest.raises(Unavailable, match="rank 0 died"):
        await opening


@pytest.mark.parametrize("folder", ["x" * 300, f"/{'x' * 300}", "/x" * 2500])
async def test_path_that_is_too_long_is_refused_like_a_missing_one(
    manager: SessionManager, gang: RecordingGang, folder: str
) -> None:
    path = f"/{folder}/step-000001"
    with pytest.raises(Damaged, match="File name too long"):
        await manager.checkpoints.load(manager.session("a"), pb.LoadCheckpointRequest(path=path))
    with pytest.raises(FailedPrecondition, match="File name too long"):
        await manager.checkpoints.begin(manager.session("a"), pb.SaveCheckpointRequest(path=path))
    manager._session = None
    request = request_of("b")
    request.spec.initial_weights = folder
    with pytest.raises(NotFound, match="the model folder does not exist"):
        await manager.open(request)
    assert gang.commands == []


async def test_the_refusals_of_an_ended_session_keep_none_of_the_refused_calls(
    manager: SessionManager,
) -> None:
    session = manager.learner("a")
    why = Unavailable("rank 0 was killed")
    session.ranks.end(why)
    for _ in range(3):
        with pytest.raises(Unavailable, match="rank 0 was killed"):
            await session.updates.train(HEADER, groups())
    assert why.__traceback__ is None


@pytest.mark.parametrize(
    ("correction", "limit"), [({}, 0.016), ({"fail_at": 0.2}, 0.2), ({"fail_at": None}, None)]
)
async def test_the_limit_that_refuses_an_update_goes_by_the_dtypes_of_the_stack(
    gang: RecordingGang, tmp_path: Path, correction: dict[str, Any], limit: float | None
) -> None:
    stack = StackConfig.model_validate({"model": tmp_path, "generator": {"dtype": "bfloat16"}})
    plan = GangPlan.of_stack(stack, "trainer-0", "trainer-0-test", tmp_path, tmp_path)
    manager = SessionManager(cast(Gang, gang), plan, stack, Activities(), session_files(tmp_path))
    request = request_of("a")
    request.spec.objective.CopyFrom(wire_objective("policy", {"type": "reinforce", "correction": correction}))
    (tmp_path / "config.json").write_text("{}", "utf-8")
    await manager.open(request)
    assert gang.fields["open_session"]["refuse_above"] == limit
