"""Objectives on three real ranks, against plain torch in float64: aggregations, a frozen reference, bonuses, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest, Mismatch, UserCodeError
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import distribution, of_tokens, plain_model, trained_tokens

TOLERANCE = 1e-5
TEMPERATURE = 0.7
SIZES = [4, 2, 5]

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Groups = list[pb.TrainGroup]
MakeGroups = Callable[..., Groups]
Policy = Callable[..., session_pb2.Objective]


@pytest.fixture
def trainer(three_ranks: Any) -> Any:
    return three_ranks


def expected(
    policy: Any, groups: Groups, aggregate: Callable[[list[torch.Tensor]], torch.Tensor], **bonus: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient as the formulas say it, one sequence at a time."""
    losses = []
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        rewards = np.array([sample.reward for sample in group.samples])
        for sample in group.samples:
            advantage = (sample.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            response = from_tensor(sample.token_ids)
            scores = distribution(policy, prompt, response, TEMPERATURE)
            new = of_tokens(scores, response)
            ratio = (new - torch.from_numpy(from_tensor(sample.logprobs).astype(np.float64))).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if bonus:
                with torch.no_grad():
                    reference = distribution(bonus["reference"], prompt, response, TEMPERATURE)
                old = of_tokens(reference, response)
                k3 = (old - new).exp() - 1 - (old - new)
                full = (scores.exp() * (scores - reference)).sum(-1)
                loss = loss + bonus["kl"] * (full if bonus.get("full") else k3)
                loss = loss + bonus["entropy"] * (scores.exp() * scores).sum(-1)
            losses.append(loss[trained_tokens(sample)])
    total = aggregate(losses)
    total.backward()
    return total.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


async def on_ranks(trainer: Any, groups: Groups) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """Loss, gradient and metrics of the same batch through the path that Train takes."""
    metrics, gradients = await trainer.gradient(groups)
    return metrics["loss"], gradients, metrics


def assert_equal(got: dict[str, np.ndarray], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        np.testing.assert_allclose(got[name], gradient.numpy(), atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)


def beyond_optimal_baselines(policy: Any, group: pb.TrainGroup) -> list[list[float]]:
    """For each trained token its sample's reward less the weighted mean of those that have as many before it."""
    prompt, energies = from_tensor(group.prompt_token_ids), []
    for sample in group.samples:
        response = from_tensor(sample.token_ids)
        with torch.no_grad():
            scores = distribution(policy, prompt, response, TEMPERATURE)
        squares = 1 - 2 * of_tokens(scores, response).exp() + scores.exp().square().sum(-1)
        energies.append(squares[trained_tokens(sample)].cumsum(0).tolist())
    rows = []
    for sample, energy in zip(group.samples, energies, strict=True):
        row = []
        for place in range(len(energy)):
            met = [
                (other.reward, weights[place])
                for other, weights in zip(group.samples, energies, strict=True)
                if len(weights) > place
            ]
            row.append(sample.reward - sum(r * w for r, w in met) / sum(w for _, w in met))
        rows.append(row)
    return rows


async def test_optimal_token_baselines_come_from_the_policys_distribution_at_each_token(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy
) -> None:
    groups = groups_of(SIZES)
    function = {"type": "tir_optimal_token_baseline"}
    function["lone_tail"] = "silent"
    objective = policy_of(advantage=function)
    await trainer.open(objective, tokens_per_microbatch=40)
    loss, gradients, _ = await on_ranks(trainer, groups)
    policy, losses = plain_model(trainer.model), []
    for group in groups:
        rows = beyond_optimal_baselines(policy, group)
        for sample, row in zip(group.samples, rows, strict=True):
            response, own = from_tensor(sample.token_ids), trained_tokens(sample)
            new = of_tokens(
                distribution(policy, from_tensor(group.prompt_token_ids), response, TEMPERATURE), response
            )[own]
            old = torch.from_numpy(from_tensor(sample.logprobs).astype(np.float64))[own]
            ratio, advantages = (new - old).exp(), torch.tensor(row, dtype=torch.float64)
            losses.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages))
    total = torch.cat(losses).mean()
    total.backward()
    assert loss == pytest.approx(total.item(), abs=TOLERANCE)
    wanted = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert_equal(gradients, wanted)


def with_reference(
    trainer: Any, now: Path, groups: Groups, **more: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """What is expected of the policy in `now` with the first one as its reference."""
    bonus = {"reference": plain_model(trainer.model), "kl": 0.3, "entropy": 0.2, **more}
    return expected(plain_model(now), groups, lambda rows: torch.cat(rows).mean(), **bonus)


async def test_the_reference_stays_where_the_session_began_and_entropy_earns_a_bonus(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    kl = {"placement": "loss", "estimator": "k3", "coefficient": 0.3}
    objective = policy_of(kl=kl, entropy_coefficient=0.2)
    await trainer.open(objective, tokens_per_microbatch=40, learning_rate=1e-3)
    first = await trainer.train(0, groups)
    assert not first.skipped
    assert first.metrics["kl/coefficient"] == pytest.approx(0.3)
    now = await trainer.export(tmp_path / "now", 1)

    loss, gradients, metrics = await on_ranks(trainer, groups)
    wanted_loss, wanted = with_reference(trainer, now, groups)
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE, abs=TOLERANCE)
    assert_equal(gradients, wanted)
    # Scoring with the reference left the policy as it was.
    assert metrics["kl/mean"] == pytest.approx(first.metrics["kl/mean"], rel=1e-5)

    samples = {sample.sample_id: sample for group in groups for sample in group.samples}
    for item in (await trainer.logprobs(groups, temperature=TEMPERATURE, reference=True)).sequences:
        samples[item.sequence_id].reference_logprobs.CopyFrom(item.logprobs)
    # What the copy says may as well come with the samples.
    sent_loss, sent, _ = await on_ranks(trainer, groups)
    assert sent_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(sent[name], gradient, rtol=1e-5, atol=1e-6)
    again = await trainer.export(tmp_path / "again", 1)
    before, after = plain_model(now), plain_model(again)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize("packing", ["off", "on"])
async def test_the_divergence_over_the_vocabulary_equals_plain_torch_in_any_chunks(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path, packing: int
) -> None:
    groups = groups_of(SIZES)
    kl = {"placement": "loss", "estimator": "full", "coefficient": 0.3}
    objective = policy_of(kl=kl, entropy_coefficient=0.2)
    cut = {"tokens_per_microbatch": 40, "logprob_chunk_tokens": 7, "packing": packing}
    await trainer.open(objective, learning_rate=1e-2, **cut)
    first = await trainer.train(0, groups)
    assert not first.skipped
    # The policy is its own reference still.
    assert first.metrics["kl/mean"] == pytest.approx(0, abs=1e-6)
    now = await trainer.export(tmp_path / "now", 1)
    loss, gradients, metrics = await on_ranks(trainer, groups)
    wanted_loss, wanted = with_reference(trainer, now, groups, full=True)
    assert metrics["kl/mean"] > 1e-3
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE, abs=TOLERANCE)
    assert_equal(gradients, wanted)


@pytest.mark.parametrize(("packing", "tail"), [("off", False), ("on", True)])
async def test_what_a_teacher_finds_likeliest_pulls_as_plain_torch_says(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path, packing: int, tail: bool
) -> None:
    groups, top_k, coefficient = groups_of(SIZES), 6, 0.7
    asked = {
        "top_k": top_k,
        "divergence": "forward" if tail else "reverse",
        "coefficient": coefficient,
        "tail": tail,
    }
    cut = {"tokens_per_microbatch": 40, "logprob_chunk_tokens": 7, "packing": packing}
    await trainer.open(policy_of(teacher=asked), learning_rate=1e-2, **cut)
    samples = {sample.sample_id: sample for group in groups for sample in group.samples}
    # The model teaches itself of a step later.
    for item in (await trainer.logprobs(groups, temperature=TEMPERATURE, top_k=top_k)).sequences:
        samples[item.sequence_id].teacher_top_token_ids.CopyFrom(item.top_token_ids)
        samples[item.sequence_id].teacher_top_logprobs.CopyFrom(item.top_logprobs)
    first = await trainer.train(0, groups)
    assert not first.skipped and 0 < first.metrics["teacher/mass"] < 1
    assert first.metrics["teacher/divergence"] == pytest.approx(0, abs=1e-5)
    now = await trainer.export(tmp_path / "now", 1)
    loss, gradients, metrics = await on_ranks(trainer, groups)
    policy, rows, distances = plain_model(now), [], []
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        rewards = np.array([sample.reward for sample in group.samples])
        for sample in group.samples:
            response, own = from_tensor(sample.token_ids), trained_tokens(sample)
            scores = distribution(policy, prompt, response, TEMPERATURE)
            ids = torch.from_numpy(from_tensor(sample.teacher_top_token_ids).astype(np.int64))
            q = torch.from_numpy(from_tensor(sample.teacher_top_logprobs).astype(np.float64)).exp()
            p = scores.exp().gather(-1, ids)
            if tail:
                p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
                q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
            distance = (q * (q / p).log() if tail else p * (p / q).log()).sum(-1)
            advantage = (sample.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            new = of_tokens(scores, response)
            ratio = (new - torch.from_numpy(from_tensor(sample.logprobs).astype(np.float64))).exp()
            plain = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            rows.append((plain + coefficient * distance)[own])
            distances.append(distance[own])
    total = torch.cat(rows).mean()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=TOLERANCE, abs=TOLERANCE)
    assert metrics["teacher/divergence"] == pytest.approx(torch.cat(distances).mean().item(), rel=1e-4)
    assert abs(metrics["teacher/divergence"]) > 1e-4
    assert_equal(gradients, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None})


async def test_weights_are_normalised_by_the_mean_that_the_ranks_find(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy
) -> None:
    correction = {
        "proximal": "trainer",
        "importance": "token",
        "importance_cap": 1.5,
        "staleness_decay": 1.0,
    }
    groups = groups_of(SIZES)
    await trainer.open(policy_of(correction=correction))
    _, plain, found = await on_ranks(trainer, groups)
    await trainer.open(policy_of(correction={**correction, "normalize_importance": True}))
    _, normalised, metrics = await on_ranks(trainer, groups)
    mean = metrics["correction/normalized_by"]
    assert mean == pytest.approx(found["correction/weight_mean"], rel=1e-5)
    assert abs(mean - 1) > 1e-3
    for name, gradient in plain.items():
        np.testing.assert_allclose(mean * normalised[name], gradient, atol=TOLERANCE, err_msg=name)


async def test_turns_of_chats_are_averaged_over_their_own_tokens(trainer: Any, groups_of: MakeGroups) -> None:
    groups, losses = groups_of(SIZES), []
    policy = plain_model(trainer.model)
    for group in groups:
        for sample in group.samples:
            response = from_tensor(sample.token_ids)
            # Two turns of the assistant with another speaker's between them.
            learned = np.arange(len(response)) % 4 != 1
            sample.mask.CopyFrom(to_tensor(learned))
            scores = distribution(policy, from_tensor(group.prompt_token_ids), response, 1.0)
            losses.append(-of_tokens(scores, response)[torch.from_numpy(learned)])
    every = torch.cat(losses)
    assert 0 < len(every) < sum(len(from_tensor(s.token_ids)) for group in groups for s in group.samples)
    await trainer.open("sft", tokens_per_microbatch=40)
    metrics = (await trainer.train(0, groups)).metrics
    assert metrics["tokens/trained"] == len(every)
    assert metrics["loss"] == pytest.approx(every.mean().item(), abs=TOLERANCE)


async def test_rollouts_beyond_the_limit_are_refused_and_change_nothing(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy
) -> None:
    groups = groups_of(SIZES)
    await trainer.open(policy_of(correction={"staleness_decay": 1.0, "fail_at": 1e-6}))
    for sample in (sample for group in groups for sample in group.samples):
        sample.version_spans.add(end=len(sample.token_ids.data) // 4).version.CopyFrom(
            Version(0, 0).to_proto()
        )
    with pytest.raises(Mismatch, match="differ between generator and trainer"):
        await trainer.train(0, groups)
    await trainer.open("sft")
    before = (await trainer.train(0, groups)).metrics["loss"]
    await trainer.open("sft")
    assert (await trainer.train(0, groups)).metrics["loss"] == pytest.approx(before, abs=1e-6)


async def test_samples_from_the_future_are_refused_by_name_and_change_nothing(
    trainer: Any, groups_of: MakeGroups
) -> None:
    groups = groups_of(SIZES)
    span = groups[1].samples[1].version_spans.add(start=0, end=1)
    span.version.CopyFrom(Version(0, 1).to_proto())
    await trainer.open()
    with pytest.raises(InvalidRequest, match="'g1/1'"):
        await trainer.train(0, groups)
    result = await trainer.train(0, groups_of(SIZES))
    assert Version.from_proto(result.policy_version) == Version(0, 1)


async def test_a_loss_of_the_user_trains_and_a_broken_file_opens_no_session(
    trainer: Any, groups_of: MakeGroups, policy_of: Policy, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(tokens, *, scale):\n    return -scale * tokens.advantages * tokens.logprobs\n")
    mine = {"type": f"{path}:loss"}
    mine["parameters"] = {"scale": 1.0}
    await trainer.open(policy_of(loss=mine))
    own = await on_ranks(trainer, groups_of(SIZES))
    await trainer.open(policy_of(loss={"type": "reinforce"}))
    ours = await on_ranks(trainer, groups_of(SIZES))
    assert own[0] == pytest.approx(ours[0], abs=TOLERANCE)
    assert_equal(own[1], {name: torch.from_numpy(values) for name, values in ours[1].items()})

    path.write_text("import nothing_of_that_name\n\n\ndef loss(tokens):\n    return tokens.logprobs\n")
    with pytest.raises(UserCodeError, match="ModuleNotFoundError"):
        await trainer.open(policy_of(loss={"type": f"{path}:loss"}))
    await trainer.open()
    assert not (await trainer.train(0, groups_of(SIZES))).skipped
