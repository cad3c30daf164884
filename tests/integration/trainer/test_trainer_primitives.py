"""ForwardBackward and OptimStep on real ranks: any number of calls is one update, nothing is counted twice or lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest, UserCodeError
from flotilla_core.version import Version

TOLERANCE = 1e-6
SIZES = [4, 2, 6, 3]
# Far from where AdamW looks at signs alone, so that a wrong size of the gradient shows.
STEP = {"epsilon": 1e-2}
EXACT = (
    "loss",
    "grad_norm",
    "tokens/trained",
    "entropy",
    "clip_fraction",
    "probs_diff/mean",
    "rollout_correlation",
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Groups = list[pb.TrainGroup]
MakeGroups = Callable[..., Groups]


async def forward_backward(
    trainer: Any, groups: Groups, loss: session_pb2.Function | None = None, request_id: str = ""
) -> pb.ForwardBackwardResponse:
    request = pb.ForwardBackwardRequest(
        run_id=trainer.run_id, groups=groups, loss=loss, request_id=request_id
    )
    return await trainer.call("ForwardBackward", request)


async def optim_step(trainer: Any, rate: float = 0.0, request_id: str = "") -> pb.OptimStepResponse:
    request = pb.OptimStepRequest(run_id=trainer.run_id, learning_rate=rate, request_id=request_id)
    return await trainer.call("OptimStep", request)


async def weights_of(trainer: Any, path: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(await trainer.export(path, step) / "model.safetensors")


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=TOLERANCE, rtol=0)


async def at_once(
    trainer: Any, groups: list[pb.TrainGroup], folder: Path, *objective: Any
) -> tuple[pb.UpdateResult, dict[str, torch.Tensor]]:
    """One update on all groups, and the weights after it; then the session begins anew."""
    await trainer.open(*objective, **STEP)
    update = await trainer.train(0, groups)
    weights = await weights_of(trainer, folder, 1)
    await trainer.open(*objective, **STEP)
    return update, weights


KL = {"placement": "loss", "estimator": "k3", "coefficient": 0.3}
AGGREGATIONS = [
    ("token_mean", KL),
    ("sequence_mean_of_token_sum", None),
    ("sequence_mean_of_token_mean", KL),
    ("constant", None),
]


@pytest.mark.parametrize(("kind", "kl"), AGGREGATIONS)
async def test_several_calls_and_a_step_are_one_update_on_all_groups(
    trainer: Any, groups_of: MakeGroups, policy_of: Callable[..., Any], tmp_path: Path, kind: int, kl: Any
) -> None:
    groups = groups_of(SIZES)
    objective = policy_of(aggregation={"type": kind}, kl=kl, entropy_coefficient=0.01)
    update, expected = await at_once(trainer, groups, tmp_path / "train", objective)
    start = await weights_of(trainer, tmp_path / "start", 0)
    for part in (groups[:1], groups[1:3], groups[3:]):
        await forward_backward(trainer, part)
    step = await optim_step(trainer)
    assert Version.from_proto(step.policy_version) == Version(0, 1)
    assert_equal(await weights_of(trainer, tmp_path / "calls", 1), expected)
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-3
    assert step.sample_ids == update.sample_ids
    for name in (*EXACT, "learning_rate", *(["kl/mean"] if kl else [])):
        assert step.metrics[name] == pytest.approx(update.metrics[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_of_token_mean"])
async def test_calls_whose_samples_weigh_little_are_one_update_on_all_groups(
    trainer: Any, groups_of: MakeGroups, policy_of: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """Weights of rewards to a power may sum up to far less than 1, and only their ratios matter."""
    groups = groups_of(SIZES)
    for number, sample in enumerate(sample for group in groups for sample in group.samples):
        sample.reward = 0.01 * (1 + number % 5)
    weights = {"by_reward": "pow", "power": 2.0}
    objective = policy_of(aggregation={"type": kind}, sample_weights=weights)
    update, expected = await at_once(trainer, groups, tmp_path / "train", objective)
    for part in (groups[:1], groups[1:]):
        await forward_backward(trainer, part)
    step = await optim_step(trainer)
    for name in ("loss", "grad_norm"):
        assert step.metrics[name] == pytest.approx(update.metrics[name], rel=1e-4), name
    assert_equal(await weights_of(trainer, tmp_path / "calls", 1), expected)


async def test_a_repeated_call_or_step_counts_once(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    _, expected = await at_once(trainer, groups, tmp_path / "train")
    first = await forward_backward(trainer, groups[:2], request_id="a")
    assert await forward_backward(trainer, groups[:2], request_id="a") == first
    await forward_backward(trainer, groups[2:], request_id="b")
    step = await optim_step(trainer, request_id="s")
    assert await optim_step(trainer, request_id="s") == step
    assert await forward_backward(trainer, groups[:2], request_id="a") == first
    with pytest.raises(FailedPrecondition, match="no gradients"):
        await optim_step(trainer)
    assert_equal(await weights_of(trainer, tmp_path / "calls", 1), expected)


async def test_train_and_gradients_take_turns_and_closing_drops_them(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await trainer.open(**STEP)
    with pytest.raises(FailedPrecondition, match="no gradients"):
        await optim_step(trainer)
    await forward_backward(trainer, groups[:1])
    with pytest.raises(FailedPrecondition, match="1 ForwardBackward calls wait"):
        await trainer.train(0, groups)
    with pytest.raises(InvalidRequest, match="learning rate"):
        await optim_step(trainer, rate=-1.0)
    assert (await optim_step(trainer, rate=0.5)).metrics["learning_rate"] == 0.5

    _, expected = await at_once(trainer, groups, tmp_path / "clean")
    await forward_backward(trainer, groups_of(SIZES, seed=9))
    await trainer.open(**STEP)
    await trainer.train(0, groups)
    assert_equal(await weights_of(trainer, tmp_path / "after", 1), expected)


async def test_a_step_on_numbers_that_are_not_finite_is_skipped_and_keeps_the_weights(
    trainer: Any, groups_of: MakeGroups, wild_groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    wild = wild_groups_of(SIZES)
    await trainer.open(**STEP)
    before = await weights_of(trainer, tmp_path / "before", 0)
    await forward_backward(trainer, groups)
    await forward_backward(trainer, wild)
    step = await optim_step(trainer)
    assert step.skipped
    assert Version.from_proto(step.policy_version) == Version(0, 0)
    assert_equal(await weights_of(trainer, tmp_path / "after", 0), before)
    await forward_backward(trainer, groups)
    assert not (await optim_step(trainer)).skipped


async def test_a_call_may_bring_its_own_loss(
    trainer: Any, groups_of: MakeGroups, function_of: Callable[..., Any], tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await trainer.open("sft", **STEP)
    await trainer.train(0, groups)
    expected = await weights_of(trainer, tmp_path / "sft", 1)
    await trainer.open(**STEP)
    first = await forward_backward(trainer, groups[:2], function_of("sft"))
    await forward_backward(trainer, groups[2:], function_of("sft"))
    await optim_step(trainer)
    assert_equal(await weights_of(trainer, tmp_path / "call", 1), expected)
    clipped = await forward_backward(trainer, groups, function_of("ppo", clip_low=0.01, clip_high=0.01))
    assert (
        clipped.metrics["clip_fraction"] > (await forward_backward(trainer, groups)).metrics["clip_fraction"]
    )
    assert first.metrics["loss"] > 0
    await optim_step(trainer)


async def test_calls_whose_losses_are_sums_add_up_to_the_sum(
    trainer: Any, groups_of: MakeGroups, policy_of: Callable[..., Any], tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    objective = policy_of(aggregation={"type": "token_sum"})
    _, expected = await at_once(trainer, groups, tmp_path / "sum", objective)
    for part in (groups[:2], groups[2:]):
        await forward_backward(trainer, part)
    await optim_step(trainer)
    assert_equal(await weights_of(trainer, tmp_path / "sums", 1), expected)


async def test_a_wrong_call_changes_nothing_and_a_broken_loss_drops_what_waited(
    trainer: Any,
    groups_of: MakeGroups,
    policy_of: Callable[..., Any],
    function_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    groups = groups_of(SIZES)
    _, expected = await at_once(trainer, groups, tmp_path / "train")
    await forward_backward(trainer, groups[:2])
    for wrong in (function_of("nonsense"), function_of("ppo", clip=1), function_of("sft", share=1)):
        with pytest.raises(InvalidRequest):
            await forward_backward(trainer, groups, wrong)
    await forward_backward(trainer, groups[2:])
    await optim_step(trainer)
    assert_equal(await weights_of(trainer, tmp_path / "calls", 1), expected)

    broken = tmp_path / "broken.py"
    broken.write_text("def loss(tokens):\n    return tokens.logprobs.sum()\n")
    await trainer.open(**STEP)
    await forward_backward(trainer, groups_of(SIZES, seed=9), request_id="lost")
    with pytest.raises(UserCodeError, match="one number for each"):
        await forward_backward(trainer, groups, function_of(f"{broken}:loss"))
    with pytest.raises(FailedPrecondition, match="dropped"):
        await optim_step(trainer)
    await forward_backward(trainer, groups, request_id="lost")
    await optim_step(trainer)
    assert_equal(await weights_of(trainer, tmp_path / "again", 1), expected)

    sums = {"type": "sequence_mean_of_token_sum"}
    await trainer.open(policy_of(aggregation=sums))
    await forward_backward(trainer, groups)
    with pytest.raises(FailedPrecondition, match="mean over tokens"):
        await forward_backward(trainer, groups, function_of("sft"))
    await trainer.open("sft")
    with pytest.raises(InvalidRequest, match="without a policy objective"):
        await forward_backward(trainer, groups, function_of("ppo"))
