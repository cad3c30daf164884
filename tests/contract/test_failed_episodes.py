"""A failed episode is no reward: whatever compares samples, the others get the advantages of a group without it.

Groups are made by the coordinator, travel as messages, and are read by the trainer's front. Beside them stand the same
groups for which the failed episodes were never asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_algorithms.table import ADVANTAGES
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import Branch, Episode, RunRecord, RunState, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import GroupRequest, GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import PolicyConfig, RolloutConfig
from flotilla_core.config.advantages import ReinforceAdvantage
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.wire.objective import ObjectiveSettings

RUN = "play-20260314-0915-7f3a"
VERSION = Version(0, 3)
UPDATES, GROUPS, MOST_SAMPLES = 8, 3, 7
NEEDED: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}, "gdpo": {"weights": [1.0, 0.5]}}
"""Parameters of advantages that groups of two samples allow, or that a run fills in."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "gae": {"unit": "turn"},
    "gigpo": {"gamma": 0.8, "step_weight": 0.5, "normalize_std": False},
}
"""Other parameters of advantages that look at turns."""


@dataclass
class Player:
    """Plays one group: an episode for each seed, and a failure where there is none."""

    seeds: list[int | None]

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        for sample_id, seed in zip(request.sample_ids, self.seeds, strict=True):
            yield episode(sample_id, seed)

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        return {item.sample_id: Outcome(0.0, terms=(float(len(item.response)), 1.0)) for item in items}


def episode(sample_id: str, seed: int | None) -> RolloutSample:
    """Return an episode of chance, in one or two sequences, or one that failed after some tokens."""
    chance = np.random.default_rng(7 if seed is None else seed)
    length = int(chance.integers(2, 12))
    trained = chance.random(length) < 0.7
    trained[0] = True
    starts = [0, length // 2] if chance.random() < 0.4 else [0]
    changes = trained[:-1] & ~trained[1:]
    changes[[start - 1 for start in starts[1:]]] |= trained[[start - 1 for start in starts[1:]]]
    ends = [*(np.flatnonzero(changes) + 1).tolist(), *([length] if trained[-1] else [])]
    played = Outcome(float(chance.integers(0, 4)) / 3 + float(chance.random() < 0.5) * 0.1)
    if seed is None:
        said = TermVerdict("environment", Said.ERROR, message="division by zero")
        played = Outcome(None, "division by zero", verdicts=(said,))
    column = chance.normal(-1, 0.3, (2, length)).astype(np.float32)
    return RolloutSample(
        sample_id,
        chance.integers(0, 9, length).astype(np.int32),
        column[0],
        "x" * int(chance.integers(1, 5)),
        (TokenSpan(VERSION, 0, length),),
        trained=trained,
        values=column[1],
        value_after=0.5,
        teacher_logprobs=column[1],
        greedy_reward=0.25,
        played=played,
        outcome=played if played.total is None else None,
        verdicts=played.verdicts,
        episode=Episode(
            "completed",
            len(ends),
            tuple((chance.integers(-2, 3, len(ends)) / 4).tolist()),
            "[]",
            tuple(Branch(s, np.array([1], np.int32)) for s in starts),
            tuple(ends),
            tuple(chance.integers(0, 3, len(ends)).tolist()),
        ),
    )


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "play", RunState.RUNNING, "{}\n", "", time.time()))
    yield ledger
    ledger.close()


async def sent(ledger: Ledger, name: str, seeds: list[int | None]) -> pb.TrainGroup:
    """Return what the trainer gets of a group."""
    player: Any = Player(seeds)
    groups = GroupRollout(
        RUN,
        RolloutConfig(prompts_per_step=1, samples_per_prompt=len(seeds)),
        sampler=player,
        scorer=player,
        ledger=ledger,
        advantage=ReinforceAdvantage(),
        wait_until_verified=AsyncMock(),
    )
    prompt = Prompt(0, 0, "1+1=", np.array([1], np.int32), "2", {})
    finished = await groups.run(GroupRequest(prompt, f"{RUN}/{name}", 3, VERSION, 30.0, 1), [])
    assert len(finished.failures) == seeds.count(None)
    message = pb.TrainGroup()
    fill(message, finished.group)
    return message


def columns_of(kind: str, groups: list[pb.TrainGroup], changed: dict[str, Any]) -> tuple[bytes, ...]:
    """Return advantages and weights as the trainer makes them, bit by bit."""
    critic: dict[str, Any] = {"critic": {}} if kind == "gae" else {}
    written = {"advantage": {"type": kind, **NEEDED.get(kind, {}), **changed}, **critic}
    section = PolicyConfig.model_validate(written).model_dump(mode="json")
    objective = PolicyObjective(ObjectiveSettings.from_wire(wire_objective("policy", section)))
    batch = UpdateBatch.read(groups, ModelLimits(9, 0), VERSION)
    batch = replace(batch, score_squares=np.square(np.arange(batch.trained.size) % 5 + 0.5))
    made, _ = objective.sequences(batch, 5)
    return tuple(made.columns[name].tobytes() for name in ("advantages", "weights"))


async def test_a_failed_episode_changes_no_bit_of_what_any_estimator_gives_the_others(ledger: Ledger) -> None:
    chance = random.Random(11)
    for update in range(UPDATES):
        drawn = [
            [chance.randrange(10_000) for _ in range(chance.randint(2, MOST_SAMPLES))] for _ in range(GROUPS)
        ]
        failing = [_with_failures(chance, seeds) for seeds in drawn]
        with_failed = [await sent(ledger, f"{update}/{n}", seeds) for n, seeds in enumerate(failing)]
        without = [await sent(ledger, f"{update}/{n + GROUPS}", [*seeds]) for n, seeds in enumerate(drawn)]
        for kind, changed in [*((kind, {}) for kind in ADVANTAGES), *OTHERWISE.items()]:
            found = columns_of(kind, with_failed, changed)
            assert found == columns_of(kind, without, changed), kind
            assert any(found[0]), f"{kind} gives something"


def _with_failures(chance: random.Random, seeds: list[int]) -> list[int | None]:
    """Return the same episodes in their order, and failed ones anywhere between them."""
    mixed: list[int | None] = [*seeds]
    for _ in range(chance.randint(1, 3)):
        mixed.insert(chance.randint(0, len(mixed)), None)
    return mixed
