"""A reward model on real ranks of a policy's gang: loss, gradient and rewards against transformers' own class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TOLERANCE = 1e-5
PAIRS = [2] * 5
CENTER = 0.02
PADDING = 0
LAYOUTS = {
    "padded": {"packing": "off", "tokens_per_microbatch": 4096},
    "one at a time": {"packing": "off", "tokens_per_microbatch": 1},
    "packed": {
        "packing": "on",
        "tokens_per_microbatch": 48,
        "activation_checkpointing": True,
    },
}
Groups = list[pb.TrainGroup]


@pytest.fixture
def trainer(two_ranks: Any) -> Any:
    return two_ranks


@pytest.fixture(scope="module")
def start_folder(two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the gang's shape with a head that is not zero, as transformers writes it."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("start") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(
        two_ranks.model, num_labels=1, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def pairs(groups_of: Callable[..., Groups]) -> Groups:
    """Whole answers; no token is the one that transformers takes for padding."""
    groups = groups_of(PAIRS)
    for group in groups:
        for holder, field in [
            (group, "prompt_token_ids"),
            *((sample, "token_ids") for sample in group.samples),
        ]:
            tokens = from_tensor(getattr(holder, field))
            getattr(holder, field).CopyFrom(to_tensor(np.maximum(tokens, PADDING + 1)))
        for sample in group.samples:
            sample.ClearField("mask")
    return groups


def objective(center: float = 0.0) -> session_pb2.Objective:
    return wire_objective("reward_model", {"center_coefficient": center})


def loaded(folder: Path) -> Any:
    """Load the model as any user of transformers does; the folder itself says that it has one label."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()


def rewards_of(model: Any, groups: Groups) -> torch.Tensor:
    """Pairs by answers; each sequence alone in its row."""
    rows = []
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        for sample in group.samples:
            tokens = np.concatenate([prompt, from_tensor(sample.token_ids)])
            rows.append(model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0, 0])
    return torch.stack(rows).unflatten(0, (-1, 2))


async def judged(trainer: Any, groups: Groups) -> np.ndarray:
    """Pairs by answers; each pair asked for by itself."""
    found = []
    for group in groups:
        metrics = await trainer.judged([group])
        found.append([metrics["preference/chosen_reward"], metrics["preference/rejected_reward"]])
    return np.array(found)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_loss_and_gradient_equal_plain_torch_for_any_layout(
    trainer: Any, pairs: Groups, start_folder: Path, layout: str
) -> None:
    await trainer.open(objective(CENTER), initial_weights=str(start_folder), **LAYOUTS[layout])
    model = loaded(start_folder)
    model.config.pad_token_id = PADDING
    chosen, rejected = rewards_of(model, pairs).unbind(1)
    loss = (-torch.nn.functional.logsigmoid(chosen - rejected) + CENTER * (chosen + rejected) ** 2).mean()
    loss.backward()
    metrics, gradients = await trainer.gradient(pairs)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
    assert metrics["preference/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=TOLERANCE)
    assert metrics["preference/accuracy"] == (chosen > rejected).double().mean().item()
    assert metrics["tokens/trained"] == sum(len(from_tensor(s.token_ids)) for g in pairs for s in g.samples)
    wanted = dict(model.named_parameters())
    assert gradients.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert parameter.grad.abs().max() > 1e-3
        np.testing.assert_allclose(
            gradients[name], parameter.grad.numpy(), atol=TOLERANCE, rtol=TOLERANCE, err_msg=name
        )


async def test_pairs_are_learned_and_the_export_scores_as_the_trainer_does(
    trainer: Any, pairs: Groups, tmp_path: Path
) -> None:
    await trainer.open(objective(), total_updates=20)
    before = await trainer.judged(pairs)
    assert (before["preference/accuracy"], before["loss"]) == (0.5, pytest.approx(np.log(2)))
    for step in range(8):
        result = await trainer.train(step, pairs)
    assert result.metrics["loss"] < 0.2
    assert (await trainer.judged(pairs))["preference/accuracy"] == 1.0
    rewards = await judged(trainer, pairs)

    folder = await trainer.export(tmp_path / "reward", 8)
    model = loaded(folder)
    assert model.num_labels == 1
    with torch.no_grad():
        np.testing.assert_allclose(rewards_of(model, pairs).numpy(), rewards, atol=TOLERANCE)
    # One to the right of the other in a batch, padded as a tokenizer does.
    model.config.pad_token_id = PADDING
    rows = [
        torch.from_numpy(np.concatenate([from_tensor(group.prompt_token_ids), from_tensor(sample.token_ids)]))
        for group in pairs
        for sample in group.samples
    ]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).long()
    with torch.no_grad():
        logits = model(input_ids=batch, attention_mask=(batch != PADDING).long()).logits
    np.testing.assert_allclose(logits.numpy().reshape(-1, 2), rewards, atol=TOLERANCE)

    await trainer.open(objective(), initial_weights=str(folder))
    np.testing.assert_allclose(await judged(trainer, pairs), rewards, atol=TOLERANCE)


async def test_pairs_of_several_calls_are_one_update(trainer: Any, pairs: Groups, start_folder: Path) -> None:
    spec = {"initial_weights": str(start_folder), "epsilon": 1e-2}
    await trainer.open(objective(CENTER), **spec)
    whole = await trainer.train(0, pairs)
    expected = await judged(trainer, pairs)
    await trainer.open(objective(CENTER), **spec)
    for part in (pairs[:2], pairs[2:]):
        await trainer.call("ForwardBackward", pb.ForwardBackwardRequest(run_id=trainer.run_id, groups=part))
    step = await trainer.call("OptimStep", pb.OptimStepRequest(run_id=trainer.run_id))
    for name in ("grad_norm", "preference/chosen_reward", "preference/accuracy"):
        assert step.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5), name
    np.testing.assert_allclose(await judged(trainer, pairs), expected, atol=TOLERANCE)


async def test_a_reward_model_goes_on_from_its_checkpoint_bit_by_bit(
    trainer: Any, pairs: Groups, tmp_path: Path
) -> None:
    await trainer.open(objective())
    await trainer.train(0, pairs)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    await trainer.save(checkpoint, Version(0, 1))
    second = await trainer.train(1, pairs)
    rewards = await judged(trainer, pairs)

    await trainer.open(objective(), lineage=1)
    await trainer.load(checkpoint)
    again = await trainer.train(1, pairs, lineage=1)
    assert again.metrics["grad_norm"] == second.metrics["grad_norm"]
    np.testing.assert_array_equal(await judged(trainer, pairs), rewards)
    assert loaded(checkpoint / "model").num_labels == 1


async def test_a_policy_after_a_reward_model_is_what_it_would_be_without(
    trainer: Any, groups_of: Callable[..., Groups]
) -> None:
    await trainer.open("sft")
    first = await trainer.train(0, groups_of(PAIRS))
    await trainer.open(objective())
    await trainer.open("sft")
    again = await trainer.train(0, groups_of(PAIRS))
    assert again.metrics["loss"] == first.metrics["loss"]
    assert again.metrics["grad_norm"] == first.metrics["grad_norm"]


async def test_what_a_reward_model_cannot_do_is_refused_and_changes_nothing(
    trainer: Any, pairs: Groups, groups_of: Callable[..., Groups], start_folder: Path, tmp_path: Path
) -> None:
    await trainer.open(objective(), initial_weights=str(start_folder))
    rewards = await judged(trainer, pairs)
    run = {"run_id": trainer.run_id}
    sequence = pb.ScoredSequence(
        sequence_id="a",
        prompt_token_ids=to_tensor(np.array([1], np.int32)),
        token_ids=to_tensor(np.array([2], np.int32)),
    )
    loss = session_pb2.Function(name="ppo")
    for method, request, said in (
        ("ComputeLogprobs", pb.ComputeLogprobsRequest(**run, sequences=[sequence]), "no log-probabilities"),
        (
            "ComputeValues",
            pb.ComputeValuesRequest(**run, sequences=[sequence]),
            "a reward model has no values",
        ),
        ("OpenWeightGroup", pb.OpenWeightGroupRequest(**run), "reward model are not for generators"),
        ("ForwardBackward", pb.ForwardBackwardRequest(**run, groups=pairs, loss=loss), "one loss alone"),
    ):
        with pytest.raises((FailedPrecondition, InvalidRequest), match=said):
            await trainer.call(method, request)
    with pytest.raises(InvalidRequest, match="a pair has two samples"):
        await trainer.train(0, groups_of([2, 3]))
    masked = groups_of(PAIRS)
    with pytest.raises(InvalidRequest, match=r"'g0/0'.*its mask is false for some tokens"):
        await trainer.train(0, masked)
    np.testing.assert_array_equal(await judged(trainer, pairs), rewards)

    three = AutoModelForSequenceClassification.from_pretrained(trainer.model, num_labels=3)
    three.save_pretrained(tmp_path / "three")
    with pytest.raises(FailedPrecondition, match="the model cannot be loaded"):
        await trainer.open(objective(), initial_weights=str(tmp_path / "three"))
    await trainer.open(objective())
    assert not (await trainer.train(0, pairs)).skipped
