"""Updates of several optimizer steps on real ranks: each step equals that of an update with its groups alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import Mismatch
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version

SIZES = [3, 2, 4]
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Policy = Callable[..., session_pb2.Objective]
MakeGroups = Callable[..., list[pb.TrainGroup]]


@pytest.fixture
def trainer(two_ranks: Any) -> Any:
    return two_ranks


async def weights(trainer: Any, folder: Path, step: int) -> dict[str, torch.Tensor]:
    await trainer.export(folder, step)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


async def test_steps_of_one_update_are_those_of_updates_on_their_groups(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await trainer.open(learning_rate=1e-3)
    for step, part in enumerate([groups[:2], groups[2:]] * 2):
        await trainer.train(step, part)
    expected = await weights(trainer, tmp_path / "one-by-one", 4)

    await trainer.open(learning_rate=1e-3, steps_per_update=2, epochs_per_update=2)
    made = await trainer.train(0, groups)
    assert Version.from_proto(made.policy_version) == Version(0, 1)
    assert made.metrics["optimizer/steps"] == 4 and not made.skipped_steps
    assert_same(await weights(trainer, tmp_path / "at-once", 1), expected)


async def test_the_proximal_policy_is_the_one_before_the_first_step(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path
) -> None:
    groups, steps = groups_of(SIZES), {"learning_rate": 1e-2, "steps_per_update": 3}
    proximal = {"staleness_decay": 1.0, "proximal": "trainer"}
    await trainer.open(policy_of(correction=proximal), **steps)
    scored = await trainer.logprobs(groups, temperature=0.7)
    made = await trainer.train(0, groups)
    assert abs(made.metrics["ratio_mean"] - 1) > 1e-4
    got = await weights(trainer, tmp_path / "recomputed", 1)

    samples = [sample for group in groups for sample in group.samples]
    for sample, sequence in zip(samples, scored.sequences, strict=True):
        sample.logprobs.CopyFrom(sequence.logprobs)
    await trainer.open(policy_of(), **steps)
    await trainer.train(0, groups)
    assert_same(got, await weights(trainer, tmp_path / "sent", 1))


async def test_a_step_that_is_not_finite_is_left_out_by_name_and_the_others_stand(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    # Finite advantages that overflow in a product with the ratio of an impossible token.
    for group in groups:
        for sample in group.samples:
            tokens = len(sample.token_ids.data) // 4
            advantage = -1e37 if group is groups[1] else 1.0
            sample.advantages.CopyFrom(to_tensor(np.full(tokens, advantage, np.float32)))
    for sample in groups[1].samples:
        tokens = len(sample.token_ids.data) // 4
        sample.logprobs.CopyFrom(to_tensor(np.full(tokens, -1000.0, np.float32)))
    await trainer.open(learning_rate=1e-3)
    for step, part in enumerate([groups[:1], groups[2:]]):
        await trainer.train(step, part)
    expected = await weights(trainer, tmp_path / "without", 2)

    await trainer.open(learning_rate=1e-3, steps_per_update=3)
    made = await trainer.train(0, groups)
    assert Version.from_proto(made.policy_version) == Version(0, 1) and not made.skipped
    assert [name.partition(":")[0] for name in made.skipped_steps] == ["step 2 of 3"]
    assert made.metrics["optimizer/steps"] == 2 and np.isfinite(made.metrics["loss"])
    assert_same(await weights(trainer, tmp_path / "skipping", 1), expected)


async def test_rollouts_are_refused_before_the_first_step_or_not_at_all(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    for group in groups:
        for sample in group.samples:
            span = sample.version_spans.add(start=0, end=len(sample.token_ids.data) // 4)
            span.version.CopyFrom(Version(0, 0).to_proto())
    correction = {"staleness_decay": 1.0, "fail_at": 1e-6}
    await trainer.open(policy_of(correction=correction), steps_per_update=3)
    before = await weights(trainer, tmp_path / "before", 0)
    with pytest.raises(Mismatch, match="differ between generator and trainer"):
        await trainer.train(0, groups)
    assert_same(await weights(trainer, tmp_path / "after", 0), before)
