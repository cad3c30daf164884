"""Real FSDP2 ranks over gloo give the numbers of plain torch, whatever the ranks and the micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import (
    FailedPrecondition,
    InvalidRequest,
    Mismatch,
    NotFinite,
    NotFound,
    StaleVersion,
)
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import assert_same_gradients, logprobs, plain_model, trained_tokens

TOLERANCE = 1e-5
TEMPERATURE = 0.7
SIZES = [4, 1, 6, 3]
BATCHINGS = [
    {
        "packing": packing,
        "logprob_chunk_tokens": chunk,
        "activation_checkpointing": recompute,
        "activation_offload": recompute,
    }
    for packing, chunk, recompute in (
        ("off", 16, False),
        ("off", 2048, True),
        ("on", 16, True),
        ("on", 2048, False),
    )
]

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Groups = list[pb.TrainGroup]
MakeGroups = Callable[..., Groups]


def plain_grpo(folder: Path, groups: Groups) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient as the formula says it, sample by sample, in one process without sharding or padding."""
    model = plain_model(folder)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        rewards = np.array([sample.reward for sample in group.samples])
        for sample in group.samples:
            spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
            advantage = (sample.reward - rewards.mean()) / (spread + 1e-6)
            response = from_tensor(sample.token_ids)
            new = logprobs(model, prompt, response, TEMPERATURE)
            ratio = (new - torch.from_numpy(from_tensor(sample.logprobs).astype(np.float64))).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            mask = trained_tokens(sample)
            total = total - objective[mask].sum()
            tokens += int(mask.sum())
    (total / tokens).backward()
    return total.item() / tokens, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


async def ranks_grpo(trainer: Any, groups: Groups) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the same batch from the ranks, through the path that Train takes."""
    metrics, gradients = await trainer.gradient(groups)
    return metrics["loss"], {name: torch.from_numpy(array) for name, array in gradients.items()}


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: "-".join(map(str, batching.values())))
@pytest.mark.parametrize("budget", [64, 4096])
async def test_loss_and_gradient_equal_plain_torch_for_any_ranks_and_layout(
    trainer: Any, groups_of: MakeGroups, budget: int, batching: dict[str, Any]
) -> None:
    groups = groups_of(SIZES)
    await trainer.open(tokens_per_microbatch=budget, **batching)
    loss, gradients = await ranks_grpo(trainer, groups)
    expected_loss, expected = plain_grpo(trainer.model, groups)
    assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
    assert_same_gradients(gradients, expected, TOLERANCE)


async def test_a_row_shared_by_copies_of_the_weights_gives_the_same_gradient(
    start_trainer: Callable[..., Any], groups_of: MakeGroups
) -> None:
    groups = groups_of(SIZES)
    async with start_trainer(nproc=2, replicate=2, sequence_parallel=2) as trainer:
        await trainer.open(tokens_per_microbatch=64)
        loss, gradients = await ranks_grpo(trainer, groups)
        expected_loss, expected = plain_grpo(trainer.model, groups)
        assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name].double(), gradient, atol=TOLERANCE, rtol=TOLERANCE)
        result = await trainer.train(0, groups)
        assert not result.skipped


@pytest.mark.parametrize("offload", [False, True])
async def test_one_update_is_adamw_on_the_clipped_mean_gradient(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path, offload: bool
) -> None:
    groups = groups_of(SIZES)
    _, gradients = plain_grpo(trainer.model, groups)
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients.values())).item()
    limit = norm / 3
    await trainer.open(max_grad_norm=limit, epsilon=1e-3, offload=offload)
    result = await trainer.train(0, groups)
    assert Version.from_proto(result.policy_version) == Version(0, 1)
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    model = AutoModelForCausalLM.from_pretrained(trainer.model, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name] * (limit / norm)
    torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0).step()
    exported = AutoModelForCausalLM.from_pretrained(
        await trainer.export(tmp_path / "m", 1), dtype=torch.float64
    )
    for (name, expected), got in zip(model.named_parameters(), exported.parameters(), strict=True):
        torch.testing.assert_close(
            got, expected, atol=TOLERANCE, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


async def test_sft_learns_the_answers_it_is_shown(trainer: Any, groups_of: MakeGroups) -> None:
    groups = groups_of([1] * 6)
    await trainer.open("sft", total_updates=20)
    losses = [(await trainer.train(step, groups)).metrics["loss"] for step in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert (await trainer.judged(groups))["loss"] < losses[-1]


@pytest.mark.parametrize(("temperature", "packing"), [(1.0, "off"), (0.7, "on")])
async def test_logprobs_equal_plain_torch_in_the_order_of_the_request(
    trainer: Any, groups_of: MakeGroups, temperature: float, packing: int
) -> None:
    groups = groups_of(SIZES, seed=5)
    await trainer.open(packing=packing, tokens_per_microbatch=64)
    asked_for = trainer.scored(groups)
    reply = await trainer.logprobs(groups, temperature=temperature, top_k=3)
    wide = await trainer.logprobs(groups, temperature=temperature, in_float32=True)
    model = AutoModelForCausalLM.from_pretrained(trainer.model, dtype=torch.float32)
    assert [item.sequence_id for item in reply.sequences] == [item.sequence_id for item in asked_for]
    for item, same, asked in zip(reply.sequences, wide.sequences, asked_for, strict=True):
        prompt, response = from_tensor(asked.prompt_token_ids), from_tensor(asked.token_ids)
        with torch.no_grad():
            expected = logprobs(model, prompt, response, temperature).numpy()
        np.testing.assert_allclose(from_tensor(item.logprobs), expected, atol=TOLERANCE)
        np.testing.assert_allclose(from_tensor(same.logprobs), expected, atol=TOLERANCE)
        best = from_tensor(item.top_logprobs)
        assert best.shape == from_tensor(item.top_token_ids).shape == (len(response), 3)
        assert (best[:, :1] >= best).all()
        assert (best[:, 0] >= from_tensor(item.logprobs) - TOLERANCE).all()


@pytest.mark.parametrize("packing", ["off", "on"])
async def test_fewer_samples_than_ranks_still_trains(
    trainer: Any, groups_of: MakeGroups, packing: int
) -> None:
    groups = groups_of([1])
    await trainer.open("sft", packing=packing)
    result = await trainer.train(0, groups)
    assert not result.skipped
    assert result.metrics["grad_norm"] > 0
    assert Version.from_proto(result.policy_version) == Version(0, 1)


async def test_an_exported_folder_gives_the_logits_that_the_trainer_has(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await trainer.open()
    await trainer.train(0, groups)
    folder = await trainer.export(tmp_path / "model", 1)
    await trainer.export(folder, 1)  # again, over the first one
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    for place in ("/", str(tmp_path / "..")):
        with pytest.raises(InvalidRequest, match="names no folder"):
            await trainer.export(Path(place), 1)
    with pytest.raises(FailedPrecondition, match="would replace what is no model"):
        await trainer.export(tmp_path, 1)
    sample, prompt = groups[0].samples[1], groups[0].prompt_token_ids
    request = pb.ComputeLogprobsRequest(run_id=trainer.run_id)
    request.sequences.add(sequence_id="s", prompt_token_ids=prompt, token_ids=sample.token_ids)
    reply = await trainer.call("ComputeLogprobs", request)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        expected = logprobs(model, from_tensor(prompt), from_tensor(sample.token_ids), 1.0).numpy()
    np.testing.assert_allclose(from_tensor(reply.sequences[0].logprobs), expected, atol=TOLERANCE)


async def test_a_session_starts_from_the_weights_that_it_names(
    trainer: Any, groups_of: MakeGroups, model_maker: Callable[..., Path], tmp_path: Path
) -> None:
    groups = groups_of(SIZES)

    async def loss_of_new_session(**spec: Any) -> float:
        await trainer.open("sft", **spec)
        return (await trainer.judged(groups))["loss"]

    booted = await loss_of_new_session()
    await trainer.train(0, groups)
    other = await loss_of_new_session(initial_weights=str(model_maker(tmp_path / "other", seed=2)))
    assert other != pytest.approx(booted, abs=1e-3)
    assert await loss_of_new_session() == pytest.approx(booted, abs=1e-6)


async def test_wrong_initial_weights_are_refused_and_harm_nothing(
    trainer: Any, groups_of: MakeGroups, model_maker: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        await trainer.open(initial_weights=str(tmp_path / "nowhere"))
    with pytest.raises(Mismatch, match="hidden_size"):
        await trainer.open(initial_weights=str(model_maker(tmp_path / "wide", seed=1, hidden_size=64)))
    await trainer.open("sft")
    assert not (await trainer.train(0, groups_of([2]))).skipped


async def test_an_update_trains_once_however_often_it_is_sent(trainer: Any, groups_of: MakeGroups) -> None:
    groups = groups_of(SIZES)
    await trainer.open()
    first = await trainer.train(0, groups)
    assert await trainer.train(0, groups) == first
    found = await trainer.call(
        "GetUpdate", pb.GetUpdateRequest(run_id=trainer.run_id, update_id=first.update_id)
    )
    assert found.result == first
    with pytest.raises(NotFound, match="is not known"):
        await trainer.call("GetUpdate", pb.GetUpdateRequest(run_id=trainer.run_id, update_id="other"))
    with pytest.raises(StaleVersion, match=r"version 0\.1"):
        await trainer.train(3, groups)


async def test_a_stream_that_ends_early_changes_nothing(trainer: Any, groups_of: MakeGroups) -> None:
    groups = groups_of(SIZES)
    await trainer.open()
    with pytest.raises(InvalidRequest, match="announced 5"):
        await trainer.train(0, groups, announced=5)
    groups[2].samples[1].token_ids.CopyFrom(to_tensor(np.array([1, 99], np.int32)))
    with pytest.raises(InvalidRequest, match="g2/1"):
        await trainer.train(0, groups)
    assert not (await trainer.train(0, groups_of(SIZES))).skipped


async def test_infinite_numbers_skip_one_update_and_keep_the_weights(
    trainer: Any, groups_of: MakeGroups, wild_groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await trainer.open("sft", dump_dir=str(tmp_path))
    before = await trainer.judged(groups)

    await trainer.open("grpo", dump_dir=str(tmp_path))
    wild = wild_groups_of(SIZES)
    skipped = await trainer.train(0, wild)
    assert skipped.skipped
    assert Version.from_proto(skipped.policy_version) == Version(0, 0)
    assert {file.suffix for file in tmp_path.iterdir()} == {".npz", ".json"}

    good = await trainer.train(0, groups[:3])
    assert not good.skipped
    assert Version.from_proto(good.policy_version) == Version(0, 1)
    with pytest.raises(NotFinite, match="2 updates in a row"):
        await trainer.train(1, wild)
        await trainer.train(1, wild[:2])
    await trainer.open("sft")
    assert (await trainer.judged(groups))["loss"] == pytest.approx(before["loss"], abs=1e-6)
