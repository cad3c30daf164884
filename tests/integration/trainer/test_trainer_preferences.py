"""Preferences on real ranks: an update that is scored first descends on the pairwise loss, on any ranks and cuts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import logprobs, plain_model, trained_tokens
from flotilla_testing.session_specs import wire_objective

TOLERANCE = 1e-5
PAIRS = [2] * 5

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Groups = list[pb.TrainGroup]
MakeGroups = Callable[..., Groups]
Margin = torch.Tensor


def preference(loss: str = "sigmoid", **fields: Any) -> Any:
    return wire_objective("preference", {"loss": loss, "beta": 0.05, "reference_free": False} | fields)


CASES: dict[str, tuple[Any, Callable[[Margin], torch.Tensor], dict[str, Any]]] = {
    "sigmoid, padded": (
        preference(label_smoothing=0.1),
        lambda h: (
            -0.9 * torch.nn.functional.logsigmoid(0.05 * h) - 0.1 * torch.nn.functional.logsigmoid(-0.05 * h)
        ),
        {"packing": "off", "tokens_per_microbatch": 4096},
    ),
    "ipo, packed": (
        preference("ipo", beta=0.5),
        lambda h: (h - 1) ** 2,
        {"packing": "on", "tokens_per_microbatch": 64, "logprob_chunk_tokens": 16},
    ),
    "hinge, one sequence at a time": (
        preference("hinge"),
        lambda h: torch.relu(1 - 0.05 * h),
        {"packing": "off", "tokens_per_microbatch": 1, "activation_checkpointing": True},
    ),
    "reference free, packed": (
        preference(reference_free=True),
        lambda h: -torch.nn.functional.logsigmoid(0.05 * h),
        {"packing": "on", "tokens_per_microbatch": 4096},
    ),
}


def sequence_logprob(model: Any, prompt: np.ndarray, sample: pb.TrainSample) -> torch.Tensor:
    """Return the sum of the log-probabilities of the counted tokens of one answer."""
    return logprobs(model, prompt, from_tensor(sample.token_ids))[trained_tokens(sample)].sum()


def plainly(
    policy: Any, reference: Any, groups: Groups, loss: Callable[[Margin], torch.Tensor]
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, accuracy and gradient as the formula says it, pair by pair, in one process without sharding or padding."""
    margins = []
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        ahead = [sequence_logprob(policy, prompt, sample) for sample in group.samples]
        if reference is not None:
            first = [sequence_logprob(reference, prompt, sample) for sample in group.samples]
            ahead = [mine - then.detach() for mine, then in zip(ahead, first, strict=True)]
        margins.append(ahead[0] - ahead[1])
    mean = torch.stack([loss(h) for h in margins]).mean()
    mean.backward()
    accuracy = float(np.mean([h.item() > 0 for h in margins]))
    return mean.item(), accuracy, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
async def test_loss_and_gradient_equal_plain_torch_for_any_ranks_and_layout(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path, case: str
) -> None:
    objective, loss, batching = CASES[case]
    groups = groups_of(PAIRS)
    await trainer.open(objective, learning_rate=1e-3, **batching)
    # One step away from the reference, so that the policy is another one.
    assert not (await trainer.train(0, groups_of(PAIRS, seed=1))).skipped
    now = await trainer.export(tmp_path / "now", 1)

    metrics, gradients = await trainer.gradient(groups)
    reference = None if objective.section.fields["reference_free"].bool_value else plain_model(trainer.model)
    wanted_loss, wanted_accuracy, wanted = plainly(plain_model(now), reference, groups, loss)
    assert metrics["loss"] == pytest.approx(wanted_loss, abs=TOLERANCE, rel=TOLERANCE)
    assert metrics["preference/accuracy"] == wanted_accuracy
    assert gradients.keys() == wanted.keys()
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in wanted.values()))
    for name, gradient in wanted.items():
        np.testing.assert_allclose(
            gradients[name], gradient.numpy(), atol=TOLERANCE * scale, rtol=TOLERANCE, err_msg=name
        )


async def test_pairs_are_learned_and_others_are_judged_without_a_change(
    trainer: Any, groups_of: MakeGroups
) -> None:
    groups = groups_of(PAIRS)
    await trainer.open(preference(beta=0.5), total_updates=20)
    before = await trainer.judged(groups)
    assert (before["preference/accuracy"], before["loss"]) == (0.5, pytest.approx(np.log(2)))
    for step in range(8):
        result = await trainer.train(step, groups)
    assert result.metrics["loss"] < 0.2
    after = await trainer.judged(groups)
    assert after["preference/accuracy"] == 1.0
    assert after["preference/chosen_logprob"] > before["preference/chosen_logprob"]
    assert (await trainer.judged(groups))["loss"] == after["loss"]


async def test_pairs_of_several_calls_are_one_update(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(PAIRS)
    spec = {"epsilon": 1e-2}
    await trainer.open(preference(), **spec)
    whole = await trainer.train(0, groups)
    expected = plain_model(await trainer.export(tmp_path / "whole", 1))
    await trainer.open(preference(), **spec)
    for part in (groups[:2], groups[2:]):
        await trainer.call("ForwardBackward", pb.ForwardBackwardRequest(run_id=trainer.run_id, groups=part))
    step = await trainer.call("OptimStep", pb.OptimStepRequest(run_id=trainer.run_id))
    for name in ("loss", "grad_norm", "preference/chosen_logprob", "preference/accuracy"):
        assert step.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5), name
    got = plain_model(await trainer.export(tmp_path / "parts", 1))
    for one, other in zip(got.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


async def test_a_group_that_is_no_pair_is_refused_by_its_sample_and_changes_nothing(
    trainer: Any, groups_of: MakeGroups
) -> None:
    good = groups_of(PAIRS)
    await trainer.open(preference())
    undisturbed = await trainer.train(0, good)
    await trainer.open(preference())
    equal, empty = groups_of(PAIRS), groups_of(PAIRS)
    equal[2].samples[1].token_ids.CopyFrom(equal[2].samples[0].token_ids)
    empty[2].samples[1].token_ids.CopyFrom(to_tensor(np.zeros(0, np.int32)))
    for wrong, named in (
        (groups_of([2, 2, 3]), "'g2/0'"),
        (groups_of([2, 2, 1]), "'g2/0'"),
        (equal, "'g2/1'"),
        (empty, "'g2/1'"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            await trainer.train(0, wrong)
    with pytest.raises(InvalidRequest, match="beta"):
        await trainer.open(preference(beta=-1.0))
    await trainer.open(preference())
    result = await trainer.train(0, good)
    assert Version.from_proto(result.policy_version) == Version(0, 1)
    assert result.metrics["grad_norm"] == pytest.approx(undisturbed.metrics["grad_norm"], rel=1e-5)
