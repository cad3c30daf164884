"""Every preset on a small model, from the samples to the gradient: the layout of an update never changes its result.

The model is a table of bigrams, whose logits depend on the token before alone, so that any layout can be computed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import PolicyConfig
from flotilla_core.config.presets import PRESETS
from flotilla_core.errors import FlotillaError, InvalidRequest, NotFinite, NotFound, UserCodeError
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.packing import Layout, pack
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.losses.divergence import full_divergence, teacher_divergence
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.update import objective_metrics
from flotilla_trainer.wire.objective import ObjectiveSettings

VOCABULARY = 13
TOLERANCE, LIMIT = 1e-5, 24
VERSION = Version(0, 3)
REFERENCE_TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2))
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_of_token_sum",
    "sequence_mean_of_token_mean",
    "constant",
    "token_sum",
)
LAYOUTS = [(1, 37, False), (1, 37, True), (2, 1, False), (2, 150, True), (3, 150, False), (3, 1, True)]
"""Ranks, token budget, packed."""
EVERYTHING: dict[str, Any] = {
    "correction": {
        "importance": "token",
        "proximal": "trainer",
        "importance_cap": 0.9,
        "sequence_low": 0.5,
        "sequence_high": 0.7,
        "staleness_decay": 0.9,
    },
    "kl": {
        "placement": "loss",
        "estimator": "k3",
        "coefficient": 0.1,
    },
    "teacher": {"top_k": 4, "divergence": "reverse", "coefficient": 0.3},
    "entropy_coefficient": 0.01,
}


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, **parameters}


def wire_objective_of(preset: str, temperature: float = 1.0, **changes: Any) -> session_pb2.Objective:
    """The objective that a run of this preset would send, with changes in its sections."""
    section: dict[str, Any] = PolicyConfig(type=preset).model_dump(mode="json")  # type: ignore[arg-type]
    # The tables of the model stand for policies that lie far apart.
    section["correction"] = {"fail_at": None}
    if preset == "gdpo":
        section["advantage"]["weights"] = [1.0, 0.5]
    for name, value in changes.items():
        own = isinstance(value, dict) and "type" not in value and section[name] is not None
        section[name] = section[name] | value if own else value
    return wire_objective("policy", section, temperature=temperature, max_response_tokens=LIMIT)


def objective_of(preset: str, **changes: Any) -> ObjectiveSettings:
    """The same, checked."""
    return ObjectiveSettings.from_wire(wire_objective_of(preset, **changes))


def make_groups(sizes: list[int], seed: int = 0) -> list[pb.TrainGroup]:
    """Unequal lengths, masks, versions and some groups of equal rewards."""
    rng, extra = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    top = REFERENCE_TABLE.log_softmax(-1).topk(4, dim=-1)
    groups = []
    for index, size in enumerate(sizes):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6)).astype(np.int32)
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(prompt))
        for number in range(size):
            response = rng.integers(0, VOCABULARY, rng.integers(1, LIMIT)).astype(np.int32)
            sample = group.samples.add(
                sample_id=f"g{index}/{number}",
                token_ids=to_tensor(response),
                logprobs=to_tensor(rng.normal(-2.5, 0.4, len(response)).astype(np.float32)),
                reward=float(index == 1 or rng.random() < 0.3),
                values=to_tensor(extra.normal(0, 1, len(response)).astype(np.float32)),
                teacher_logprobs=to_tensor(extra.normal(-2.0, 0.4, len(response)).astype(np.float32)),
            )
            sample.reward_terms.extend([sample.reward, float(len(response) % 3)])
            sample.value_after = float(extra.normal(0, 1))
            sample.greedy_reward = 0.25 * (index % 3)
            if number == 1:
                sample.mask.CopyFrom(to_tensor(np.arange(len(response)) % 3 > 0))
            for end in range(3, len(response) + 3, 3):
                sample.turns.add(end=min(end, len(response)), state=1 + (index + end) % 2)
            sample.teacher_top_token_ids.CopyFrom(to_tensor(top.indices[response].int().numpy()))
            sample.teacher_top_logprobs.CopyFrom(to_tensor(top.values[response].numpy()))
            span = sample.version_spans.add(start=0, end=len(response) // 2)
            span.version.CopyFrom(Version(0, 2).to_proto())
        groups.append(group)
    return groups


def reordered(groups: list[pb.TrainGroup]) -> list[pb.TrainGroup]:
    moved = []
    for group in reversed(groups):
        other = pb.TrainGroup(group_id=group.group_id, prompt_token_ids=group.prompt_token_ids)
        other.samples.extend(reversed(group.samples))
        moved.append(other)
    return moved


def result(
    objective: ObjectiveSettings,
    groups: list[pb.TrainGroup],
    *,
    budget: int = 10_000,
    ranks: int = 1,
    packed: bool = False,
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and metrics of an update, by the path that the front and the ranks take."""
    front, rank = session_objective(objective), Objective(objective)
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), VERSION)
    # What a token gets from the reference depends on the token alone, so that any order of samples has the same.
    reference = -2.0 - 0.1 * batch.all_responses().tokens[batch.all_responses().scored].astype(np.float32)
    if front.scores_reference(batch):
        batch = replace(batch, reference_logprobs=reference)
    if front.scores_distributions(batch):
        batch = replace(batch, score_squares=0.1 * reference.astype(np.float64) ** 2)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sums: dict[str, float] = {}
    scores = None
    if front.scores_policy(several_steps=False):
        asked = batch.all_responses()
        rows = torch.log_softmax(table.detach(), -1)[asked.tokens[asked.scored - 1].astype(np.int64)]
        scores = rows.numpy()[np.arange(len(rows)), asked.tokens[asked.scored]]
    sequences, _ = front.sequences(batch, 5, scores)
    for batches in pack(sequences, Layout(budget, ranks, packed)):
        for micro in batches:
            columns = {name: torch.from_numpy(values) for name, values in micro.columns.items()}
            before = torch.from_numpy(micro.tokens).flatten()[torch.from_numpy(micro.positions)].long()
            distribution = torch.log_softmax(table[before], -1)
            logprobs = distribution.gather(-1, torch.from_numpy(micro.targets)[:, None].long())[:, 0]
            columns["divergence"] = full_divergence(table[before], REFERENCE_TABLE[before])
            if (teacher := rank.teacher(columns)) is not None:
                columns["teacher_divergence"] = teacher_divergence(table[before], teacher)
            terms = rank(logprobs, -(distribution.exp() * distribution).sum(-1), columns)
            (terms.loss * 0.0 if micro.idle else terms.loss).backward()
            if not micro.idle:
                for name, value in terms.sums.items():
                    sums[name] = sums.get(name, 0.0) + value.item()
    assert table.grad is not None
    totals = {name: sums.get(name, 0.0) for name in [*sums, "clipped", "ratio"]}
    return sums["loss"], table.grad.numpy(), objective_metrics(totals, {}, set(sums))


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == pytest.approx(other[0], abs=TOLERANCE)
    np.testing.assert_allclose(one[1], other[1], atol=TOLERANCE)
    assert one[2] == pytest.approx(other[2], abs=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_neither_cuts_nor_ranks_nor_padding_nor_order_change_an_update(preset: str) -> None:
    objective, groups = objective_of(preset), make_groups([6, 3, 8, 2, 7])
    whole = result(objective, groups)
    assert np.abs(whole[1]).max() > 1e-4  # There is something to compare.
    for ranks, budget, packed in LAYOUTS:
        assert_same(result(objective, groups, budget=budget, ranks=ranks, packed=packed), whole)
    if preset != "clip_cov":  # It draws tokens by their place in the update.
        assert_same(result(objective, reordered(groups), budget=37, ranks=2), whole)


@pytest.mark.parametrize("estimator", ["k3", "full"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_corrections_divergence_and_entropy_do_not_depend_on_the_layout_either(
    aggregation: str, estimator: int
) -> None:
    objective = objective_of("grpo", aggregation={"type": aggregation}, **EVERYTHING)
    groups = make_groups([4, 3, 5, 2, 3])
    whole = result(objective, groups)
    assert 0 < whole[2]["correction/left_out"] < 1 and "teacher/divergence" in whole[2]
    for ranks, budget, packed in LAYOUTS:
        assert_same(result(objective, groups, budget=budget, ranks=ranks, packed=packed), whole)
    assert_same(result(objective, reordered(groups), budget=37, ranks=3), whole)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("kind", "floor"),
    [("token", 0), ("segment", 0), ("sequence", 0), ("icepop", 0.3), ("icepop_sequence", 1e-6)],
)
def test_weights_and_rejections_do_not_depend_on_the_layout_either(
    kind: str, floor: float, normalize: bool
) -> None:
    correction = {
        "importance": kind,
        "proximal": "trainer",
        "importance_cap": 3.0,
        "normalize_importance": normalize,
        "rejection": [
            {"measure": "k1", "low": 0.3, "high": 3.0},
            {"measure": "k3", "over": "sequence_mean", "high": 3.0},
        ],
        **({"importance_floor": floor} if floor else {}),
    }
    objective, groups = objective_of("grpo", correction=correction), make_groups([4, 3, 5, 2, 3])
    whole = result(objective, groups)
    assert 0 < whole[2]["correction/left_out"] < 1 and np.abs(whole[1]).max() > 1e-4
    for ranks, budget, packed in LAYOUTS:
        assert_same(result(objective, groups, budget=budget, ranks=ranks, packed=packed), whole)


@pytest.mark.parametrize("sizes", [[2], [1], [7], [13, 11], [2] * 17])
@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "gspo", "reinforce_plus_plus"])
def test_awkward_batch_sizes_are_exact(preset: str, sizes: list[int]) -> None:
    objective, groups = objective_of(preset), make_groups(sizes, seed=3)
    whole = result(objective, groups)
    assert_same(result(objective, groups, budget=29, ranks=3), whole)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "kimi", "topr"])
def test_a_sample_without_a_trained_token_is_context_alone(preset: str) -> None:
    objective, groups = objective_of(preset), make_groups([3, 4])
    masked = groups[0].samples[2]
    masked.mask.CopyFrom(to_tensor(np.zeros(len(masked.token_ids.data) // 4, np.bool_)))
    assert_same(result(objective, groups, budget=1, ranks=2), result(objective, groups))


WHITENED = ("lite_ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Refused with `whiten`: their advantages are whitened already, or what it undoes belongs to them."""


@pytest.mark.parametrize(
    ("preset", "whiten"),
    [
        (preset, whiten)
        for preset in PRESETS
        for whiten in (False, True)
        # Distillation has no rewards to leave groups out by.
        if preset != "distillation" and not (whiten and preset in WHITENED)
    ],
)
def test_groups_that_are_dropped_leave_every_mean_deviation_and_denominator_too(
    preset: str, whiten: bool
) -> None:
    groups = make_groups([4, 3, 5, 3], seed=1)
    for sample in groups[1].samples:
        sample.reward = 0.5
    objective = objective_of(preset, advantage={"drop_uniform_groups": True, "whiten": whiten})
    dropped = result(objective, groups)
    alone = result(objective, [groups[0], groups[2], groups[3]])
    assert np.abs(alone[1]).max() > 1e-4  # There is something to compare.
    assert dropped[0] == pytest.approx(alone[0], abs=TOLERANCE)
    np.testing.assert_allclose(dropped[1], alone[1], atol=TOLERANCE)


def test_turns_have_ratios_of_their_own() -> None:
    groups = make_groups([3, 4])
    ours = {"clip_low": 0.05, "clip_high": 0.05}
    by_turns = objective_of("grpo", loss=function("gspo", over="segment", **ours))
    whole = objective_of("grpo", loss=function("gspo", over="sequence", **ours))
    assert_same(result(by_turns, groups, budget=29, ranks=3), result(by_turns, groups))
    assert np.abs(result(by_turns, groups)[1] - result(whole, groups)[1]).max() > 1e-4
    for group in groups:
        for sample in group.samples:
            sample.ClearField("mask")
    # Without context in between a response is one turn.
    assert_same(result(by_turns, groups), result(whole, groups))


def test_a_turn_ends_where_context_or_another_response_begins() -> None:
    groups = make_groups([2])
    for sample, mask in zip(groups[0].samples, ([1, 1, 0, 1], [1, 0, 0, 1]), strict=True):
        sample.Clear()
        sample.sample_id = f"s{mask}"
        sample.token_ids.CopyFrom(to_tensor(np.ones(4, np.int32)))
        sample.logprobs.CopyFrom(to_tensor(np.full(4, -1, np.float32)))
        sample.mask.CopyFrom(to_tensor(np.array(mask, np.bool_)))
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), VERSION)
    objective = objective_of("gspo", loss=function("gspo", over="segment"))
    sequences, _ = PolicyObjective(objective).sequences(batch, 0)
    assert sequences.columns["segments"].tolist() == [1, 1, 2, 3, 4]


def branched(groups: list[pb.TrainGroup]) -> list[pb.TrainGroup]:
    """Cut every longer sample into two branches; the prompt of the second one ends as the first one does."""
    for sample in (sample for group in groups for sample in group.samples):
        tokens = from_tensor(sample.token_ids)
        if len(tokens) > 3:
            cut = len(tokens) // 2
            for start, prompt in ((0, group_prompt(groups, sample)), (cut, [5, 5, int(tokens[cut - 1])])):
                sample.branches.add(start=start, prompt_token_ids=to_tensor(np.array(prompt, np.int32)))
    return groups


def group_prompt(groups: list[pb.TrainGroup], sample: pb.TrainSample) -> list[int]:
    (group,) = (group for group in groups if sample in group.samples)
    prompt: list[int] = from_tensor(group.prompt_token_ids).tolist()
    return prompt


@pytest.mark.parametrize("preset", PRESETS)
def test_branches_lie_anywhere_in_the_layout_of_an_update(preset: str) -> None:
    objective, groups = objective_of(preset), branched(make_groups([6, 3, 8, 2, 7]))
    whole = result(objective, groups)
    for ranks, budget, packed in LAYOUTS:
        assert_same(result(objective, groups, budget=budget, ranks=ranks, packed=packed), whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_in_branches_weighs_as_much_as_in_one_sequence(aggregation: str) -> None:
    objective = objective_of("grpo", aggregation={"type": aggregation})
    # The model knows the token before alone, and the prompts of the branches end as what was there.
    cut, uncut = branched(make_groups([6, 3, 8])), make_groups([6, 3, 8])
    assert any(sample.branches for sample in cut[0].samples)
    assert_same(result(objective, cut), result(objective, uncut))


@pytest.mark.parametrize("preset", PRESETS)
def test_context_tokens_have_no_gradient_at_all(preset: str) -> None:
    groups = make_groups([6, 3, 8])
    before_context = 12
    for sample in (sample for group in groups for sample in group.samples):
        tokens = from_tensor(sample.token_ids) % before_context
        mask = np.arange(len(tokens)) % 4 < 2
        mask[0] = True
        tokens[np.flatnonzero(~mask[1:])] = before_context
        sample.token_ids.CopyFrom(to_tensor(tokens.astype(np.int32)))
        sample.mask.CopyFrom(to_tensor(mask))
    for group in groups:
        prompt = from_tensor(group.prompt_token_ids) % before_context
        group.prompt_token_ids.CopyFrom(to_tensor(prompt.astype(np.int32)))
    gradient = result(objective_of(preset), groups)[1]
    assert not gradient[before_context].any() and np.abs(gradient).max() > 1e-4


@pytest.mark.parametrize("baseline", ["batch", "running"])
def test_groups_that_are_dropped_leave_the_baseline_and_the_history_too(baseline: str) -> None:
    groups = make_groups([4, 3, 5], seed=1)
    for sample in groups[1].samples:
        sample.reward = 0.5
    advantage = function("grpo", baseline=baseline, normalize_std=True, drop_uniform_groups=True)
    objective = objective_of("grpo", advantage=advantage)
    dropped, alone = result(objective, groups), result(objective, [groups[0], groups[2]])
    assert dropped[0] == pytest.approx(alone[0], abs=TOLERANCE)
    np.testing.assert_allclose(dropped[1], alone[1], atol=TOLERANCE)
    front = PolicyObjective(objective)
    front.sequences(UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), VERSION), 0)
    front.adapt({}, samples=12)
    assert front.state()["reward_history"]["count"] == 9


@pytest.mark.parametrize("preset", PRESETS)
def test_responses_that_were_cut_off_leave_every_mean_deviation_and_denominator_too(preset: str) -> None:
    groups = make_groups([6, 3, 8, 3], seed=1)
    gone = [groups[0].samples[2], groups[2].samples[0], *groups[3].samples]
    for sample in gone:
        sample.truncated = True
    for group in groups:  # No two best of a group are equal.
        for number, sample in enumerate(group.samples):
            sample.reward += 0.01 * number
    cut = result(objective_of(preset, advantage={"drop_truncated": True}), groups)
    alone = [pb.TrainGroup(group_id=g.group_id, prompt_token_ids=g.prompt_token_ids) for g in groups[:3]]
    for group, left in zip(groups, alone, strict=False):
        left.samples.extend(sample for sample in group.samples if not sample.truncated)
    expected = result(objective_of(preset), alone)
    assert np.abs(expected[1]).max() > 1e-4  # There is something to compare.
    assert cut[0] == pytest.approx(expected[0], abs=TOLERANCE)
    np.testing.assert_allclose(cut[1], expected[1], atol=TOLERANCE)
    assert np.abs(cut[1] - result(objective_of(preset), groups)[1]).max() > 1e-4


def test_an_update_of_dropped_groups_alone_has_no_gradient() -> None:
    groups = make_groups([3, 4])
    for group in groups:
        for sample in group.samples:
            sample.reward = 1.0
    loss, gradient, _ = result(objective_of("dapo"), groups)
    assert (loss, np.abs(gradient).max()) == (0.0, 0.0)


def test_advantages_of_the_caller_are_taken_as_they_are() -> None:
    groups = make_groups([1])
    own = np.linspace(-1, 1, len(groups[0].samples[0].token_ids.data) // 4, dtype=np.float32)
    groups[0].samples[0].advantages.CopyFrom(to_tensor(own))
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), VERSION)
    sequences, _ = PolicyObjective(objective_of("grpo")).sequences(batch, 0)
    np.testing.assert_array_equal(sequences.columns["advantages"], own)


ON_THE_WAY_TO_ADVANTAGES: dict[str, dict[str, Any]] = {
    "kl.placement reward": {
        "kl": {
            "placement": "reward",
            "estimator": "k1",
            "coefficient": 0.1,
        }
    },
    "advantage.whiten": {"advantage": {"whiten": True}},
    "advantage.clip": {"advantage": {"clip": 1.0}},
    "advantage.reward_clip": {"advantage": {"reward_clip": 1.0}},
    "advantage.overlong": {"advantage": {"overlong": {"buffer_tokens": 4, "penalty": 1.0}}},
    "advantage.reward_normalization": {"advantage": {"reward_normalization": {"mean": "batch"}}},
    "shuffle_rewards": {"shuffle_rewards": True},
}


@pytest.mark.parametrize("key", ON_THE_WAY_TO_ADVANTAGES)
def test_advantages_that_are_sent_are_refused_where_they_would_have_to_be_changed(key: str) -> None:
    groups = make_groups([1])
    length = len(groups[0].samples[0].token_ids.data) // 4
    groups[0].samples[0].advantages.CopyFrom(to_tensor(np.ones(length, np.float32)))
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), VERSION)
    objective = objective_of("reinforce", **ON_THE_WAY_TO_ADVANTAGES[key])
    batch = replace(batch, reference_logprobs=np.zeros(length, np.float32))
    with pytest.raises(InvalidRequest, match=f"algorithm.{key} .*sample 'g0/0'"):
        PolicyObjective(objective).sequences(batch, 0)


def sampled_by(versions: tuple[int, int], distances: tuple[float, float]) -> list[pb.TrainGroup]:
    """Return two samples of these steps; the table gives the tokens of each this much more than the rollout did."""
    groups = make_groups([2])
    table = torch.log_softmax(
        torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)), -1
    )
    tokens = np.arange(4, dtype=np.int32)
    before = np.concatenate([from_tensor(groups[0].prompt_token_ids)[-1:], tokens[:-1]])
    exact = table[torch.from_numpy(before).long(), torch.from_numpy(tokens).long()].numpy()
    for sample, step, distance in zip(groups[0].samples, versions, distances, strict=True):
        sample_id = sample.sample_id
        sample.Clear()
        sample.sample_id = sample_id
        sample.token_ids.CopyFrom(to_tensor(tokens))
        sample.logprobs.CopyFrom(to_tensor(np.log(np.exp(exact) + distance).astype(np.float32)))
        sample.version_spans.add(start=0, end=4).version.CopyFrom(Version(0, step).to_proto())
    return groups


def test_how_far_the_policy_has_moved_is_not_taken_for_another_engine() -> None:
    now, before = VERSION.step, VERSION.step - 1
    _, _, moved = result(objective_of("grpo"), sampled_by((now, before), (0.001, 0.2)))
    assert moved["probs_diff/fresh"] == pytest.approx(0.001, abs=1e-5)
    _, _, differs = result(objective_of("grpo"), sampled_by((now, before), (0.02, 0.2)))
    assert differs["probs_diff/fresh"] == pytest.approx(0.02, abs=1e-5)
    # Where all of it is old there is nothing to compare.
    _, _, old = result(objective_of("grpo"), sampled_by((before, before), (0.2, 0.2)))
    assert old["tokens/fresh_share"] == 0 and "probs_diff/fresh" not in old


def broken_update(field: str) -> list[pb.TrainGroup]:
    groups = make_groups([3, 2])
    sample = groups[1].samples[1]
    if field == "reward":
        sample.reward = float("nan")
    else:
        for group in groups:
            for one in group.samples:
                one.ClearField(field)
    return groups


@pytest.mark.parametrize(
    ("field", "kind", "named"),
    [("reward", NotFinite, "'g1/1'"), ("logprobs", InvalidRequest, "'g0/0'")],
)
def test_what_an_objective_cannot_use_is_refused_by_name(
    field: str, kind: type[FlotillaError], named: str
) -> None:
    batch = UpdateBatch.read(broken_update(field), ModelLimits(VOCABULARY, 0), VERSION)
    with pytest.raises(kind, match=named):
        PolicyObjective(objective_of("grpo")).sequences(batch, 0)
    # Nothing of it matters to a supervised session.
    session_objective(ObjectiveSettings()).sequences(batch, 0)


def test_a_reward_that_is_not_finite_is_named_where_groups_are_judged_by_it() -> None:
    batch = UpdateBatch.read(broken_update("reward"), ModelLimits(VOCABULARY, 0), VERSION)
    with pytest.raises(NotFinite, match="'g1/1'"):
        PolicyObjective(objective_of("dapo")).sequences(batch, 0)


def test_plain_reinforce_needs_no_logprobs_until_something_compares_with_the_rollout() -> None:
    batch = UpdateBatch.read(broken_update("logprobs"), ModelLimits(VOCABULARY, 0), VERSION)
    PolicyObjective(objective_of("rloo")).sequences(batch, 0)
    corrected = objective_of("rloo", correction={"importance": "token"})
    with pytest.raises(InvalidRequest, match="log-probabilities"):
        PolicyObjective(corrected).sequences(batch, 0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown loss": ({"loss": function("pqo")}, "pqo"),
    "no loss": ({"loss": function("")}, r"section\.loss"),
    "unknown parameter": ({"loss": function("gspo", dual_clip=2.0)}, "dual_clip"),
    "out of range": ({"loss": function("ppo", clip_low=-1.0)}, "clip_low"),
    "unknown advantage": ({"advantage": function("gripo")}, "gripo"),
    "no aggregation": ({"aggregation": {"type": "none"}}, r"section\.aggregation\.type"),
    "no cap": ({"correction": {"importance": "token", "importance_cap": 0}}, "importance_cap"),
    "no decay": ({"correction": {"staleness_decay": 0}}, "staleness_decay"),
    "distributions as a reward": (
        {"kl": {"placement": "reward", "estimator": "full"}},
        "kl.placement",
    ),
    "no estimator": ({"kl": {"placement": "loss", "estimator": "none"}}, "kl.estimator"),
    "negative bonus": ({"entropy_coefficient": -1.0}, "entropy_coefficient"),
    "no temperature": ({"temperature": 0.0}, "temperature"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_objective_that_cannot_be_is_refused_by_field(case: str) -> None:
    changes, named = WRONG[case]
    with pytest.raises(InvalidRequest, match=named):
        ObjectiveSettings.from_wire(wire_objective_of("grpo", **changes))


USER_CODE = """
import numpy as np

def scalar(tokens):
    return tokens.logprobs.sum()

def broken(outcomes):
    raise KeyError("no such thing")

def short(outcomes):
    return np.zeros(1)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_CODE)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        ("nothing", UserCodeError, "defines no function nothing"),
        ("broken", UserCodeError, "KeyError"),
        ("short", UserCodeError, "shape"),
    ],
)
def test_an_advantage_of_the_user_that_fails_is_named(
    code: Path, name: str, kind: type[FlotillaError], named: str
) -> None:
    with pytest.raises(kind, match=named) as caught:
        result(objective_of("grpo", advantage=function(f"{code}:{name}")), make_groups([3, 4]))
    assert f"mine.py:{name}" in str(caught.value)


def test_a_loss_of_the_user_gives_one_number_a_token(code: Path) -> None:
    objective = objective_of("grpo", loss=function(f"{code}:scalar"))
    with pytest.raises(UserCodeError, match="not one number for each"):
        result(objective, make_groups([3, 4]))
    with pytest.raises(NotFound, match="cannot be read"):
        ObjectiveSettings.from_wire(wire_objective_of("grpo", loss=function("/nowhere/mine.py:loss")))
