"""What a session fetches may take any time: it is waited for while bytes arrive, and no longer than the run wants it.

The session of the coordinator, the front of a trainer and the files of both are real and talk over gRPC; the ranks
answer at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from flotilla.common.v1 import files_pb2 as files_pb
from flotilla.trainer.v1 import session_pb2, trainer_pb2_grpc
from flotilla_coordinator.trainers import session as sessions
from flotilla_coordinator.trainers.learners import with_references
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.trainers.session import Gang
from flotilla_coordinator.trainers.spec import session_spec
from flotilla_core import rpc
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.errors import DeadlineExceeded
from flotilla_core.rpc import patience
from flotilla_core.service import Activities
from flotilla_core.service.operate import OperateServicer
from flotilla_core.transfer import Files, FileServicer, folders, offers, shared_folder
from flotilla_core.transfer import files as files_module
from flotilla_testing.credentials import credential
from flotilla_testing.files import files_in
from flotilla_testing.servers import serving
from flotilla_testing.session_specs import gang_facts
from flotilla_trainer.front import session_manager
from flotilla_trainer.front.servicer import TrainerServicer
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.front.session_manager import SessionManager
from flotilla_trainer.gang import ranks
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.wire.frames import Frame

LIMIT_S = 20.0
IDLE_S = 1.0
"""The silence of a trainer that the coordinator bears here."""
PIECE = 100 << 10
PIECES = 25
WEIGHTS = os.urandom(PIECES * PIECE)
CONFIG = RunConfig.model_validate(
    {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
)


class SlowFiles(FileServicer):
    """Sends small pieces with a pause after each; after some of them it may say nothing more."""

    def __init__(self, offered: Any) -> None:
        super().__init__(offered)
        self.pause_s = 0.0
        self.stalls_after = -1
        self.sent = 0
        self.left = asyncio.Event()
        """Set when the last one who read went away."""

    async def ReadFile(
        self, request: files_pb.ReadFileRequest, context: Any
    ) -> AsyncIterator[files_pb.ReadFileResponse]:
        self.left.clear()
        try:
            async for reply in super().ReadFile(request, context):
                for start in range(0, len(reply.data), PIECE):
                    if self.sent == self.stalls_after:
                        await asyncio.Event().wait()
                    yield files_pb.ReadFileResponse(data=reply.data[start : start + PIECE])
                    self.sent += 1
                    await asyncio.sleep(self.pause_s)
        finally:
            self.left.set()


class InstantGang:
    """Ranks that have done everything as soon as they are told to."""

    size = lanes = lane_width = 1
    slow_timeout_s = LIMIT_S

    def __init__(self) -> None:
        self.facts = gang_facts(max_sequence_tokens=4096)
        self.loaded: list[Path] = []

    async def wait_ready(self) -> None:
        """Always ready."""

    async def bring(self, path: Path, *, sealed: bool, run_id: str) -> None:
        """There is no other host."""

    async def load(self, folder: Path, head: str, *, frozen: bool) -> None:
        self.loaded.append(folder)

    def phases(self) -> list[str]:
        return ["rank 0: waiting for a command"]

    async def command(self, kind: str, fields: dict[str, Any], *_: Any, **__: Any) -> list[Frame]:
        if kind == "export":
            folder = Path(fields["path"])
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(WEIGHTS)
        return [Frame(kind, 0, {"fits": 1 << 20} if kind == "open_session" else {}, {})]


@dataclass
class Pair:
    """A coordinator and a trainer on hosts that share no folder."""

    folder: Path
    files: Files
    """Those of the coordinator."""
    source: SlowFiles
    gang: InstantGang
    address: str
    """Where the trainer answers."""
    channel: grpc.aio.Channel
    told: list[str] = field(default_factory=list)

    def session(self, run_id: str = "run") -> PolicyTrainer:
        """Return a session that starts from weights which the trainer has to fetch."""
        place = self.folder / "runs" / run_id
        place.mkdir(parents=True, exist_ok=True)
        weights = CONFIG.model_copy(update={"initial_weights": self.folder / "weights"})
        spec = with_references(session_spec(weights, place / "dumps"), self.files.offer, shared_folder(place))
        spec.initial_folder.path, spec.run_directory.path = "/not/there/weights", "/not/there/.key"

        async def runs() -> list[str]:
            return []

        def tell(who: str, what: str) -> None:
            self.told.append(f"{who} is {what}" if what else "")

        stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)
        gang = Gang("policy", stub, "trainer-0-1", 0.0, "trainer-0", self.files, self.channel, tell)
        return PolicyTrainer(run_id, cast(session_pb2.SessionSpec, spec), gang, runs)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(session_manager, "SHOW_EVERY_S", 0.05)
    monkeypatch.setattr(sessions, "CLOSE_SLACK_S", IDLE_S / 2)
    monkeypatch.setattr(sessions, "SESSION_TIMEOUT_S", IDLE_S / 2)
    monkeypatch.setattr(files_module, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    weights, model = tmp_path / "weights", tmp_path / "model"
    for folder in (weights, model):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(WEIGHTS)

    here = files_in(tmp_path / "coordinator")
    source = SlowFiles(here.offers)
    trusted = credential(tmp_path)
    async with serving(source, credential=trusted) as here.address:
        activities, gang = Activities(), InstantGang()
        there = files_in(tmp_path / "trainer", here.address, activities=activities)
        stack = StackConfig(model=model)
        manager = SessionManager(
            cast(ranks.Gang, gang),
            GangPlan.of_stack(stack, "trainer-0", "trainer-0-1", model, tmp_path),
            stack,
            activities,
            SessionFiles(there, tmp_path / "trainer" / "remote-runs", gang.bring),
        )
        operate = object.__new__(OperateServicer)
        operate._host = cast(Any, SimpleNamespace(activities=activities))
        served = TrainerServicer(manager), operate, FileServicer(there.offers)
        async with (
            serving(*served, credential=trusted) as there.address,
            rpc.connect(there.address, credential=trusted) as channel,
        ):
            yield Pair(tmp_path, here, source, gang, there.address, channel)


async def test_weights_that_take_longer_than_any_silence_are_waited_for_and_shown(pair: Pair) -> None:
    pair.source.pause_s = 3 * IDLE_S / PIECES
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(pair.session().open(), LIMIT_S)
    assert asyncio.get_running_loop().time() - started > 2 * IDLE_S
    (loaded,) = pair.gang.loaded
    assert (loaded / "model.safetensors").read_bytes() == WEIGHTS
    shown = [
        one
        for one in pair.told
        if f"trainer-0 is fetching /not/there/weights from {pair.files.address}" in one
    ]
    # The first look may come before the first piece.
    assert len(shown) > 5 and all(one.endswith("of 2.4 MiB") for one in shown[1:])
    assert pair.told[-1] == "", "at the end nothing is shown any more"


async def test_a_source_that_stalls_is_given_up_by_its_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "SILENT_S", 0.2)
    monkeypatch.setattr(files_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(sessions, "SESSION_TIMEOUT_S", LIMIT_S)
    pair.source.stalls_after = 10
    with pytest.raises(
        DeadlineExceeded, match=rf"/not/there/weights does not arrive \(from {pair.files.address}\)"
    ):
        await asyncio.wait_for(pair.session().open(), LIMIT_S)
    # What had arrived is kept for the next attempt.
    pair.source.stalls_after = -1
    sent = pair.source.sent
    await asyncio.wait_for(pair.session().open(), LIMIT_S)
    assert pair.source.sent - sent < PIECES - 5


async def test_a_trainer_that_does_nothing_new_is_given_up_with_its_last_words(pair: Pair) -> None:
    pair.source.stalls_after = 2
    with pytest.raises(DeadlineExceeded, match=r"no progress for 1 s.*the last that it did: fetching"):
        await asyncio.wait_for(pair.session().open(), LIMIT_S)


async def test_a_closed_run_ends_its_fetch_and_frees_the_trainer(pair: Pair) -> None:
    pair.source.stalls_after = 2
    session = pair.session()
    opening = asyncio.create_task(session.open())
    async with asyncio.timeout(LIMIT_S):
        while not any("fetching" in one for one in pair.told):
            await asyncio.sleep(0.01)
    # As a run that is stopped: it no longer waits, and closes what it was opening.
    opening.cancel()
    await asyncio.wait({opening})
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(session.close(), LIMIT_S)
    assert asyncio.get_running_loop().time() - started < IDLE_S
    await asyncio.wait_for(pair.source.left.wait(), LIMIT_S)
    pair.source.stalls_after = -1
    await asyncio.wait_for(pair.session("other").open(), LIMIT_S)


async def test_a_model_that_is_read_for_long_on_its_way_is_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pair.session()
    await asyncio.wait_for(session.open(), LIMIT_S)
    monkeypatch.setattr(folders, "PART_BYTES", PIECE)
    monkeypatch.setattr(offers, "SAY_EVERY_S", 0.1)
    monkeypatch.setattr(files_module, "SILENT_S", IDLE_S / 2)
    monkeypatch.setattr(files_module, "PATIENCE_S", IDLE_S)
    reads = folders.hashlib.sha256

    class SlowDigest:
        """Takes its time for each part, as a slow disk does."""

        def __init__(self) -> None:
            self._digest = reads()

        def update(self, data: bytes) -> None:
            pause.wait(3 * IDLE_S / PIECES)
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    pause = threading.Event()
    monkeypatch.setattr(
        folders, "hashlib", SimpleNamespace(sha256=lambda *data: reads(*data) if data else SlowDigest())
    )
    await asyncio.wait_for(session.export(pair.folder / "exported"), LIMIT_S)
    assert (pair.folder / "exported" / "model.safetensors").read_bytes() == WEIGHTS
    assert any(f"coordinator is waiting until {pair.address} has read" in one for one in pair.told)
