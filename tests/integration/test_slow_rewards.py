"""Scores of rewards that are slow, and of replicas that are silent: the first are waited for, the second are not.

Real servers, workers and calls; what lasts seconds in a fleet is shortened.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc
from flotilla_coordinator.rollouts import scoring
from flotilla_coordinator.rollouts.scoring import Outcome, RewardServiceScorer, Scorer
from flotilla_core import rpc
from flotilla_core.config import RewardTermConfig
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.rpc import Replica, ReplicaPool
from flotilla_core.trust import Credential
from flotilla_reward import scoring as reward_scoring
from flotilla_reward.answers import Workers
from flotilla_reward.service import RewardServicer
from flotilla_testing.credentials import credential
from flotilla_testing.files import NO_FILES
from flotilla_testing.servers import serving
from flotilla_workers.jail.jail import no_jail

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RewardService"].full_name
SILENT_S = 1.5
CALLS = 12
GROUP = 4
"""Samples of a call. At a tenth of a second for each, the last call waits for several times SILENT_S."""
LIMIT_S = 30.0
SERVES = f"""
import asyncio, pathlib, sys
from flotilla.reward.v1 import reward_pb2_grpc
from flotilla_core.config.stack import BindConfig
from flotilla_core.rpc import RpcServer
from flotilla_core.trust import Credential
from flotilla_reward.answers import Workers
from flotilla_reward.service import RewardServicer
from flotilla_workers.jail.jail import no_jail

async def main():
    server = RpcServer(BindConfig(), credential=Credential(pathlib.Path(sys.argv[1])))
    servicer = RewardServicer(Workers(0, no_jail), None)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, {SERVICE_NAME!r})
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Mute(reward_pb2_grpc.RewardServiceServicer):
    """Takes every call and says nothing more, not even that it lives."""

    async def Score(self, request: pb.ScoreRequest, context: Any) -> AsyncIterator[pb.ScoreResponse]:
        await asyncio.Event().wait()
        yield pb.ScoreResponse()


class Fleet:
    """Reward replicas as a run has them."""

    def __init__(self, stack: AsyncExitStack, trusted: Credential) -> None:
        self._stack = stack
        self._credential = trusted
        self._known: dict[str, reg.Registration] = {}
        self.replicas: ReplicaPool[reward_pb2_grpc.RewardServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_REWARD,
            reward_pb2_grpc.RewardServiceStub,
            partial(rpc.connect, credential=trusted),
        )
        stack.push_async_callback(self.replicas.close)

    async def workers(self, name: str) -> Workers:
        """A replica with one worker."""
        workers = Workers(1, no_jail)
        self._stack.push_async_callback(workers.stop)
        await workers.start()
        await self.serves(name, RewardServicer(workers, NO_FILES))
        return workers

    async def serves(self, name: str, servicer: reward_pb2_grpc.RewardServiceServicer) -> None:
        server = serving(servicer, credential=self._credential)
        await self.is_at(name, await self._stack.enter_async_context(server))

    async def is_at(self, name: str, address: str) -> None:
        self._known[name] = reg.Registration(
            kind=reg.SERVICE_KIND_REWARD,
            name=name,
            instance_id=name,
            address=address,
            state=reg.INSTANCE_STATE_READY,
            protocol_version=PROTOCOL_VERSION,
            capacity={"workers": 1},
        )
        await self.replicas.update(self._known)

    async def stopped(self, name: str) -> None:
        """A replica that is connected, and whose process then stands still."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVES, str(self._credential.path), stdout=asyncio.subprocess.PIPE
        )
        self._stack.push_async_callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        await self.is_at(name, (await process.stdout.readline()).decode().strip())
        stub = self.named(name).stub
        await rpc.unary(stub.ListRewards, pb.ListRewardsRequest(), timeout_s=LIMIT_S)
        process.send_signal(signal.SIGSTOP)

    async def scores(self, calls: int, *, reward: str, timeout_s: float = 1.0) -> list[Outcome]:
        """Of that many calls at once: each scorer makes one of its own."""

        def group(call: int) -> list[pb.ScoreItem]:
            names = [f"run/{call}/{index}" for index in range(GROUP)]
            return [pb.ScoreItem(sample_id=name, response="4", answer="4") for name in names]

        term = RewardTermConfig(reward=reward, timeout_s=timeout_s)
        scorers = [Scorer(RewardServiceScorer("run", (term,), self.replicas, LIMIT_S)) for _ in range(calls)]
        async with asyncio.timeout(LIMIT_S):
            scored = await asyncio.gather(*(scorer.score(group(call)) for call, scorer in enumerate(scorers)))
        return [outcome for group in scored for outcome in group.values()]

    def named(self, name: str) -> Replica[reward_pb2_grpc.RewardServiceAsyncStub]:
        return next(replica for replica in self.replicas.everyone() if replica.name == name)

    @property
    def ejections(self) -> dict[str, int]:
        return {replica.name: replica.ejections for replica in self.replicas.everyone()}


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(scoring, "SILENT_S", SILENT_S)
    monkeypatch.setattr(reward_scoring, "SIGN_OF_LIFE_S", 0.1)
    async with AsyncExitStack() as stack:
        yield Fleet(stack, credential(tmp_path))


def slow_file(folder: Path, *, loads_s: float = 0.0) -> str:
    path = folder / "slow.py"
    path.write_text(
        f"import time\n\ntime.sleep({loads_s})\n\n\n"
        "def reward(prompt, response, answer, info):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    return f"{path}:reward"


async def test_calls_that_wait_behind_others_cost_no_replica_and_no_worker(
    fleet: Fleet, tmp_path: Path
) -> None:
    workers = await fleet.workers("reward-0")
    outcomes = await fleet.scores(CALLS, reward=slow_file(tmp_path))
    assert [outcome.total for outcome in outcomes] == [1.0] * CALLS * GROUP
    assert workers.replaced == 0 and fleet.ejections == {"reward-0": 0}


async def test_a_file_may_load_for_longer_than_a_replica_may_be_silent(fleet: Fleet, tmp_path: Path) -> None:
    workers = await fleet.workers("reward-0")
    outcomes = await fleet.scores(1, reward=slow_file(tmp_path, loads_s=2 * SILENT_S))
    assert [outcome.total for outcome in outcomes] == [1.0] * GROUP
    assert workers.replaced == 0 and fleet.ejections == {"reward-0": 0}


async def test_waiting_calls_leave_the_limit_of_a_sample_as_it_is(fleet: Fleet, tmp_path: Path) -> None:
    workers = await fleet.workers("reward-0")
    outcomes = await fleet.scores(2, reward=slow_file(tmp_path), timeout_s=0.01)
    assert all(outcome.timed_out for outcome in outcomes) and fleet.ejections == {"reward-0": 0}
    assert workers.replaced >= 2 * GROUP - 1


@pytest.mark.parametrize("silence", ["stopped", "mute"])
async def test_a_silent_replica_is_ejected_and_its_samples_are_scored_elsewhere(
    fleet: Fleet, silence: str
) -> None:
    if silence == "mute":
        await fleet.serves("silent", Mute())
    else:
        await fleet.stopped("silent")
    await fleet.workers("well")
    outcomes = await fleet.scores(2, reward="exact")
    assert [outcome.total for outcome in outcomes] == [1.0] * 2 * GROUP
    assert fleet.ejections == {"silent": 1, "well": 0}
    assert f"nothing came for {SILENT_S:g} s" in fleet.named("silent").why
