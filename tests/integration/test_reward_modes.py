"""Rewards as a run file combines them, from a real reward service to the reward that a sample gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc
from flotilla_coordinator.rollouts.scoring import RewardServiceScorer, Scorer
from flotilla_core import rpc
from flotilla_core.config import RunConfig, load_text
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.rpc import ReplicaPool
from flotilla_reward.answers import Workers
from flotilla_reward.service import RewardServicer
from flotilla_testing.credentials import credential
from flotilla_testing.files import NO_FILES
from flotilla_testing.servers import serving
from flotilla_workers.jail.jail import no_jail

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = """
name: modes
steps: 1
data: {train: /x.jsonl}
reward_mode: MODE
rewards:
  - {reward: format, name: shape, weight: 0.5, parameters: {sections: [answer]}GATE}
  - {reward: length, weight: 2, parameters: {at_most: 2, margin: 2}}
  - {reward: f1, weight: 0}
"""
RESPONSES = {
    "tagged": "<answer>Paris</answer>",
    "tagged and long": "<answer>It is Paris now</answer>",
    "plain": "Paris",
}
# Words are those of the whole response, its tags among them: 3, 6 and 1.
TERMS = {"tagged": (1.0, 0.5), "tagged and long": (1.0, 0.0), "plain": (0.0, 1.0)}
TOTALS = {
    "weighted": {"tagged": 1.5, "tagged and long": 0.5, "plain": 2.0},
    "gated": {"tagged": 1.5, "tagged and long": 0.5, "plain": 0.0},
    "min": {"tagged": 0.5, "tagged and long": 0.0, "plain": 0.0},
    "max": {"tagged": 1.0, "tagged and long": 0.5, "plain": 2.0},
    "product": {"tagged": 0.5, "tagged and long": 0.0, "plain": 0.0},
    "first": {"tagged": 0.5, "tagged and long": 0.5, "plain": 2.0},
}

Replicas: TypeAlias = "ReplicaPool[reward_pb2_grpc.RewardServiceAsyncStub]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        trusted = credential(Path(tmp_path_factory.mktemp("modes")))
        servicer = RewardServicer(Workers(0, no_jail), NO_FILES)
        address = await stack.enter_async_context(serving(servicer, credential=trusted))
        pool: Replicas = ReplicaPool(
            reg.SERVICE_KIND_REWARD,
            reward_pb2_grpc.RewardServiceStub,
            partial(rpc.connect, credential=trusted),
        )
        stack.push_async_callback(pool.close)
        one = reg.Registration(
            kind=reg.SERVICE_KIND_REWARD,
            name="reward-0",
            instance_id="reward-0",
            address=address,
            state=reg.INSTANCE_STATE_READY,
            protocol_version=PROTOCOL_VERSION,
        )
        await pool.update({"reward-0": one})
        yield pool


@pytest.mark.parametrize("mode", TOTALS)
async def test_a_sample_has_the_reward_of_its_mode_and_the_value_of_each_term(
    replicas: Replicas, mode: str
) -> None:
    gate = ", gate_at: 1" if mode == "gated" else ""
    config = load_text(RunConfig, RUN.replace("MODE", mode).replace("GATE", gate))
    scorer = Scorer(RewardServiceScorer("run", config.rewards, replicas, 30.0), config.reward_mode)
    items = [pb.ScoreItem(sample_id=name, response=text, answer="Paris") for name, text in RESPONSES.items()]
    outcomes = await scorer.score(items)
    assert {name: outcome.total for name, outcome in outcomes.items()} == TOTALS[mode]
    assert {name: outcome.terms[:2] for name, outcome in outcomes.items()} == TERMS
    assert {tuple(said.reward for said in one.verdicts) for one in outcomes.values()} == {
        ("shape", "length", "f1")
    }
