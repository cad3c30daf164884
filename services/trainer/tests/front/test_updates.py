"""Updates without a counted sample are told apart from those that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import BatchingConfig
from flotilla_core.errors import Exhausted, InvalidRequest
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import as_struct, gang_facts, wire_objective
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.front.session import Session
from flotilla_trainer.front.session_progress import NOTHING_COUNTS
from flotilla_trainer.front.session_ranks import SessionRanks
from flotilla_trainer.front.session_settings import session_settings
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.frames import Frame

TOKENS = np.array([3, 4, 5], np.int32)
MADE = {"metrics": {"tokens/trained": 6.0}, "skipped": "", "skipped_steps": []}


class AgreeingGang:
    """Makes every step that it is asked for."""

    size = lanes = lane_width = 1

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.rates: list[float] = []
        self.limits: list[float | None] = []
        self.facts = gang_facts()

    async def command(self, kind: str, *arguments: Any, **options: Any) -> list[Frame]:
        self.commands.append(kind)
        self.rates += [arguments[0]["learning_rate"]] if kind == "train" else []
        self.limits += [arguments[0]["refuse_above"]] if kind in ("train", "optim_step") else []
        return [Frame(kind, 0, {**MADE}, {})]


def groups(*rewards: tuple[float, float]) -> list[pb.TrainGroup]:
    made = []
    for index, pair in enumerate(rewards):
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(np.array([1], np.int32)))
        for number, reward in enumerate(pair):
            group.samples.add(
                sample_id=f"g{index}/{number}",
                token_ids=to_tensor(TOKENS),
                logprobs=to_tensor(np.full(3, -1.0, np.float32)),
                reward=reward,
            )
        made.append(group)
    return made


@pytest.fixture
def gang() -> AgreeingGang:
    return AgreeingGang()


@pytest.fixture
def session(gang: AgreeingGang, tmp_path: Path) -> Session:
    section = {"advantage": {"type": "grpo", "drop_uniform_groups": True}}
    spec = session_pb2.SessionSpec(
        optimizer=as_struct({"schedule": "constant", "max_skipped_updates": 1}),
        objective=wire_objective("policy", section),
        batching=as_struct({"tokens_per_microbatch": 64, "logprob_chunk_tokens": 8}),
        total_updates=4,
    )
    request = pb.OpenSessionRequest(run_id="a", spec=spec)
    return Session(request, session_settings(spec), tmp_path, cast(Gang, gang), Activities())


def header(number: int, version: int) -> pb.TrainHeader:
    return pb.TrainHeader(
        run_id="a", update_id=f"a/0.{number}", policy_version=Version(0, version).to_proto()
    )


async def test_updates_in_which_nothing_counts_take_no_step_and_are_not_held_against_the_run(
    session: Session, gang: AgreeingGang
) -> None:
    for number in (1, 2, 3):
        result = await session.updates.train(header(number, 0), groups((1.0, 1.0), (0.0, 0.0)))
        assert result.skipped == NOTHING_COUNTS and len(result.sample_ids) == 4
        assert result.metrics["tokens/counted_share"] == 0
    assert gang.commands == [] and session.version == Version(0, 0)
    made = await session.updates.train(header(4, 0), groups((1.0, 1.0), (0.0, 1.0)))
    assert not made.skipped and session.version == Version(0, 1) and gang.commands == ["train"]


async def test_a_run_may_change_its_learning_rate_with_every_update(
    session: Session, gang: AgreeingGang
) -> None:
    for number, peak in ((1, 0.5), (2, 0.25)):
        changed = header(number, number - 1)
        changed.learning_rate.CopyFrom(pb.LearningRate(peak=peak, total_updates=4))
        await session.updates.train(changed, groups((1.0, 0.0)))
    assert gang.rates == [0.5, 0.25]
    wrong = header(3, 2)
    wrong.learning_rate.CopyFrom(pb.LearningRate(peak=float("nan"), total_updates=4))
    with pytest.raises(InvalidRequest, match="learning rate is nan"):
        await session.updates.train(wrong, groups((1.0, 0.0)))
    assert session.version == Version(0, 2)


async def test_an_update_in_which_nothing_counts_is_not_looked_at_twice(session: Session) -> None:
    uniform = groups((1.0, 1.0))
    first = await session.updates.train(header(1, 0), uniform)
    assert await session.updates.train(header(1, 0), uniform) is first
    assert (await session.updates.result("a/0.1")).skipped


async def test_a_step_on_calls_in_which_nothing_counts_is_no_step(
    session: Session, gang: AgreeingGang
) -> None:
    for _ in range(2):
        await session.gradients.add(pb.ForwardBackwardRequest(run_id="a", groups=groups((1.0, 1.0))))
        step = await session.gradients.step(pb.OptimStepRequest())
        assert step.skipped == NOTHING_COUNTS and session.version == Version(0, 0)
    await session.gradients.add(pb.ForwardBackwardRequest(run_id="a", groups=groups((1.0, 0.0))))
    step = await session.gradients.step(pb.OptimStepRequest(refuse_above=0.25))
    assert not step.skipped and session.version == Version(0, 1)
    assert gang.limits == [None, None, 0.25], (
        "what the run has measured counts, else the limit of the session"
    )


async def test_micro_batches_that_exceed_the_memory_are_halved_for_the_rest_of_the_session(
    gang: AgreeingGang,
) -> None:
    ranks = SessionRanks("a", BatchingConfig(tokens_per_microbatch=2048), cast(Gang, gang), Activities())
    given = Sequences(np.zeros(2400, np.int32), np.full(8, 300), np.arange(8) * 300 + 299)
    tried: list[int] = []

    async def attempt() -> None:
        tried.append(max(batch.tokens.size for batch in ranks.pack(given)[0]))
        if tried[-1] > 700:
            raise Exhausted("a micro-batch does not fit")

    await ranks.fitted(attempt)
    assert len(tried) == 3 and tried[-1] <= 700
    await ranks.fitted(attempt)
    assert len(tried) == 4

    async def hopeless() -> None:
        raise Exhausted("nothing fits")

    with pytest.raises(Exhausted, match="nothing fits"):
        await ranks.fitted(hopeless)
