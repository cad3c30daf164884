"""A critic on real FSDP2 ranks: values, loss and gradient against plain torch in float64, whatever the cuts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, AutoModelForTokenClassification

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest, NotFinite
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import trained_tokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

EXACT = 1e-6
VALUE_OFF = 5e-6
"""Values are float32 sums up to four, and nothing averages their rounding."""
SIZES = [4, 1, 5]
GAMMA, LAM, CLIP, KL = 0.98, 0.9, 0.15, 0.1
LAYOUTS = [
    {"packing": packing, "tokens_per_microbatch": budget, "activation_checkpointing": recompute}
    for packing, budget, recompute in (
        ("off", 4096, False),
        ("off", 48, True),
        ("on", 48, False),
        ("on", 4096, True),
    )
]
Groups = list[pb.TrainGroup]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def critic(start_trainer: Callable[..., Any]) -> AsyncIterator[Any]:
    async with start_trainer(name="critic", nproc=2) as started:
        yield started


@pytest.fixture(scope="module")
def start_folder(critic: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the gang's shape with a head that is not zero, as transformers writes it."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("start") / "model"
    model = AutoModelForTokenClassification.from_pretrained(critic.model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    torch.nn.init.constant_(model.score.bias, 0.3)
    model.save_pretrained(folder)
    return folder


def value_objective(policy: session_pb2.Objective) -> session_pb2.Objective:
    """What the critic of this policy learns."""
    policy.kind = "value"
    return policy


@pytest.fixture
def objective(policy_of: Callable[..., Any]) -> session_pb2.Objective:
    """Returns of shaped rewards: bounded, punished for length, less their distance from a reference."""
    advantage = {
        "type": "gae",
        "gamma": GAMMA,
        "lam": LAM,
        "reward_clip": 1.0,
        "overlong": {"buffer_tokens": 8, "penalty": 0.5},
        "whiten": True,
    }
    kl = {"placement": "reward", "estimator": "k1", "coefficient": KL}
    return value_objective(policy_of(advantage=advantage, kl=kl, critic={"value_clip": CLIP}))


@pytest.fixture
def groups(groups_of: Callable[..., Groups]) -> Groups:
    """Return groups with values and a reference in addition to the usual columns."""
    made, rng, extra = groups_of(SIZES), np.random.default_rng(5), np.random.default_rng(6)
    for group in made:
        for sample in group.samples:
            count = len(from_tensor(sample.token_ids))
            sample.values.CopyFrom(to_tensor(rng.normal(0, 0.3, count).astype(np.float32)))
            sample.reference_logprobs.CopyFrom(to_tensor(rng.normal(-3.0, 0.5, count).astype(np.float32)))
            sample.value_after = float(extra.normal(0, 0.3))
            sample.truncated = count % 2 == 0
    return made


def plain_values(model: Any, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """Return the values of one sequence alone before each response token, and after the last one."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    return model(input_ids=tokens[None]).logits[0, len(prompt) - 1 :, 0]


def plain_returns(sample: pb.TrainSample) -> list[float]:
    """Returns as the formulas say it, over the trained tokens one by one."""
    count = len(from_tensor(sample.token_ids))
    mask = trained_tokens(sample)
    values = from_tensor(sample.values).astype(np.float64).tolist()
    distance = from_tensor(sample.logprobs).astype(np.float64) - from_tensor(sample.reference_logprobs)
    own = [place for place in range(count) if mask[place]]
    # Bounded first; then, at a limit of 20 tokens of its own, the last 8 cost up to a half.
    reward = max(-1.0, min(1.0, sample.reward)) - 0.5 * max(0, len(own) - 12) / 8
    returns, carried = list(values), 0.0
    following = sample.value_after if sample.truncated else 0.0
    for place in reversed(own):
        gained = (reward if place == own[-1] else 0.0) - KL * float(distance[place])
        carried = gained + GAMMA * following - values[place] + GAMMA * LAM * carried
        following = values[place]
        returns[place] = carried + values[place]
    return returns


def plain_loss(folder: Path, groups: Groups) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss and gradient sample by sample in one process, and how many tokens were clipped."""
    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    total, tokens, clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids)
        for sample in group.samples:
            response = from_tensor(sample.token_ids)
            values = plain_values(model, prompt, response)[:-1]
            old = torch.from_numpy(from_tensor(sample.values).astype(np.float64))
            returns = torch.tensor(plain_returns(sample), dtype=torch.float64)
            plain = (values - returns) ** 2
            bounded = (old + (values - old).clamp(-CLIP, CLIP) - returns) ** 2
            own = trained_tokens(sample)
            total = total + 0.5 * torch.maximum(plain, bounded)[own].sum()
            clipped += int((bounded > plain)[own].sum())
            tokens += int(own.sum())
    (total / tokens).backward()
    return (
        total.item() / tokens,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        clipped,
    )


async def values_of(critic: Any, groups: Groups) -> dict[str, np.ndarray]:
    request = pb.ComputeValuesRequest(run_id=critic.run_id, sequences=critic.scored(groups), after_last=True)
    reply = await critic.call("ComputeValues", request)
    return {item.sequence_id: from_tensor(item.values) for item in reply.sequences}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
async def test_values_loss_and_gradient_equal_plain_torch_for_any_layout(
    critic: Any,
    objective: session_pb2.Objective,
    groups: Groups,
    start_folder: Path,
    layout: dict[str, Any],
) -> None:
    await critic.open(objective, initial_weights=str(start_folder), **layout)
    model = AutoModelForTokenClassification.from_pretrained(
        start_folder, num_labels=1, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    got = await values_of(critic, groups)
    for group in groups:
        for sample in group.samples:
            prompt, response = from_tensor(group.prompt_token_ids), from_tensor(sample.token_ids)
            expected = plain_values(model, prompt, response).detach().numpy()
            np.testing.assert_allclose(got[sample.sample_id], expected, atol=VALUE_OFF)

    metrics, gradients = await critic.gradient(groups)
    loss, expected_gradient, clipped = plain_loss(start_folder, groups)
    assert metrics["loss"] == pytest.approx(loss, abs=EXACT)
    assert metrics["clip_fraction"] * metrics["tokens/trained"] == pytest.approx(clipped)
    assert 0 < clipped < metrics["tokens/trained"]
    assert gradients.keys() == expected_gradient.keys()
    for name, gradient in expected_gradient.items():
        assert gradient.abs().max() > 0.001
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(gradients[name] / scale, gradient / scale, atol=5 * EXACT, err_msg=name)


async def test_a_critic_of_a_language_model_expects_nothing_until_it_has_learned(
    critic: Any, objective: session_pb2.Objective, groups: Groups, tmp_path: Path
) -> None:
    await critic.open(objective, epsilon=1e-3)
    assert all((values == 0).all() for values in (await values_of(critic, groups)).values())
    # Its policy may be ahead of it.
    span = groups[0].samples[1].version_spans.add(start=0, end=1)
    span.version.CopyFrom(Version(0, 5).to_proto())
    returns = [value for g in groups for sample in g.samples for value in own_returns(sample)]
    first = await critic.train(0, groups)
    assert Version.from_proto(first.policy_version) == Version(0, 1) and not first.skipped
    assert first.metrics["return_mean"] == pytest.approx(np.mean(returns), abs=1e-5)
    assert first.metrics["value_mean"] == pytest.approx(
        np.mean([value for g in groups for s in g.samples for value in own(s, from_tensor(s.values))]),
        abs=1e-5,
    )
    losses = [first.metrics["loss"]] + [(await critic.train(i, groups)).metrics["loss"] for i in range(1, 6)]
    assert losses[-1] < losses[0]

    learned = await values_of(critic, groups)
    folder = await critic.export(tmp_path / "critic", 6)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    prompt, sample = from_tensor(groups[0].prompt_token_ids), groups[0].samples[0]
    expected = plain_values(model, prompt, from_tensor(sample.token_ids)).detach().numpy()
    np.testing.assert_allclose(learned[sample.sample_id], expected, atol=1e-5)
    await critic.open(objective, initial_weights=str(folder))
    again = await values_of(critic, groups)
    np.testing.assert_allclose(again[sample.sample_id], learned[sample.sample_id], atol=1e-6)


def own(sample: pb.TrainSample, numbers: Any) -> list[float]:
    return [float(value) for value, is_own in zip(numbers, trained_tokens(sample), strict=True) if is_own]


def own_returns(sample: pb.TrainSample) -> list[float]:
    return own(sample, plain_returns(sample))


async def test_a_critic_goes_on_from_its_checkpoint_bit_by_bit(
    critic: Any, objective: session_pb2.Objective, groups: Groups, tmp_path: Path
) -> None:
    await critic.open(objective)
    await critic.train(0, groups)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    await critic.save(checkpoint, Version(0, 1), coordinator_state=b"here")
    second = await critic.train(1, groups)
    values = await values_of(critic, groups)

    await critic.open(objective, lineage=1)
    assert (await critic.load(checkpoint)).coordinator_state == b"here"
    again = await critic.train(1, groups, lineage=1)
    assert again.metrics["loss"] == second.metrics["loss"]
    for sequence_id, expected in values.items():
        np.testing.assert_array_equal((await values_of(critic, groups))[sequence_id], expected)


async def test_an_update_with_an_infinite_loss_leaves_the_critic_as_it_was(
    critic: Any, objective: session_pb2.Objective, groups: Groups, tmp_path: Path
) -> None:
    advantage = objective.section["advantage"]
    advantage["reward_clip"] = None
    await critic.open(objective, dump_dir=str(tmp_path))
    assert not (await critic.train(0, groups)).skipped
    before = await values_of(critic, groups)
    reward, groups[2].samples[3].reward = groups[2].samples[3].reward, 1e30
    skipped = await critic.train(1, groups)
    assert skipped.skipped and Version.from_proto(skipped.policy_version) == Version(0, 1)
    assert {file.suffix for file in tmp_path.iterdir()} == {".npz", ".json"}
    for sequence_id, values in (await values_of(critic, groups)).items():
        np.testing.assert_array_equal(values, before[sequence_id])
    groups[2].samples[3].reward = reward
    assert not (await critic.train(1, groups[1:])).skipped
    groups[2].samples[3].reward = 1e30
    with pytest.raises(NotFinite, match="2 updates in a row"):
        await critic.train(2, groups)
        await critic.train(2, groups[1:])


async def test_what_a_critic_cannot_do_is_refused(
    critic: Any, objective: session_pb2.Objective, groups: Groups, groups_of: Callable[..., Groups]
) -> None:
    with pytest.raises(FailedPrecondition, match="the critic's, the session is for policy"):
        await critic.open("grpo")
    await critic.open(objective)
    with pytest.raises(InvalidRequest, match="the field `values` is empty"):
        await critic.train(0, groups_of(SIZES))
    groups[0].samples[0].ClearField("reference_logprobs")
    with pytest.raises(InvalidRequest, match="`reference_logprobs` holds 0 numbers"):
        await critic.train(0, groups)
    sequence = pb.ScoredSequence(
        sequence_id="a",
        prompt_token_ids=to_tensor(np.array([1], np.int32)),
        token_ids=to_tensor(np.array([2], np.int32)),
    )
    with pytest.raises(FailedPrecondition, match="no log-probabilities"):
        await critic.call(
            "ComputeLogprobs", pb.ComputeLogprobsRequest(run_id=critic.run_id, sequences=[sequence])
        )
    with pytest.raises(FailedPrecondition, match="not for generators"):
        await critic.call("OpenWeightGroup", pb.OpenWeightGroupRequest(run_id=critic.run_id))
    objective.section["kl"].update({"target": 0.1})
    with pytest.raises(InvalidRequest, match=r"kl\.target"):
        await critic.open(objective)


async def test_the_body_alone_loads_from_what_a_critic_writes(start_folder: Path) -> None:
    body = AutoModel.from_pretrained(start_folder)
    assert body.config.num_hidden_layers == 2
