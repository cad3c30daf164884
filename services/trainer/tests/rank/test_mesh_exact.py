"""An update and its scores are those of one rank, for every arrangement of copies, shards and lanes.

With compiled layers as well, in the arrangement that asks most of them: they are traced and differentiated as for any
compiler. Other layouts of compiled layers are held to plain ones in test_compilation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, Qwen3Config

from flotilla_core.config import (
    BatchingConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardModelConfig,
)
from flotilla_core.errors import FailedPrecondition
from flotilla_testing.listening_front import ListeningFront
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.rank import compiled_layers
from flotilla_trainer.rank.checkpoint import RankCheckpoints
from flotilla_trainer.rank.compilation import CompilerWatch
from flotilla_trainer.rank.cut import RankMesh, gathered, local
from flotilla_trainer.rank.model_checks import check_sequence_parallel
from flotilla_trainer.rank.objective import Objective, rank_objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.reference_weights import ReferenceDistribution, ReferenceWeights
from flotilla_trainer.rank.scoring import score, values_of
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.rank.value_model import RewardModel, ValueModel
from flotilla_trainer.wire.frames import Frame
from flotilla_trainer.wire.objective import POLICY, REWARD_MODEL, VALUE, ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
VOCABULARY = 31
CPU = torch.device("cpu")
LENGTHS = (2, 13, 7, 3, 23, 2, 5)
"""Primes; with padding alone in a row the shortest feeds one token, fewer than any lane has ranks."""
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
PPO = {"type": "ppo", **CLIP}


def policy(temperature: float = 1.0, **section: Any) -> ObjectiveSettings:
    return ObjectiveSettings(POLICY, PolicyConfig.model_validate(section), temperature)


OBJECTIVES = {
    "sft": ObjectiveSettings(),
    "ppo": policy(
        0.7,
        loss=PPO,
        correction={"proximal": "trainer", "importance": "token", "importance_cap": 1.1, "fail_at": None},
        entropy_coefficient=0.01,
        kl={"placement": "loss", "estimator": "k3"},
    ),
    "gspo": policy(
        loss={"type": "gspo", **CLIP},
        correction={"sequence_low": 0.5, "sequence_high": 0.9, "fail_at": None},
        kl={"placement": "loss", "estimator": "k2"},
    ),
    "gmpo": policy(
        loss={"type": "gmpo", **CLIP},
        correction={"proximal": "trainer", "importance": "sequence", "importance_cap": 1.1, "fail_at": None},
        kl={"placement": "loss", "estimator": "k1"},
    ),
    "kimi": policy(loss={"type": "kimi", "tau": 0.1}, kl={"placement": "loss", "estimator": "abs"}),
    "value": ObjectiveSettings(VALUE, PolicyConfig(type="ppo", critic=CriticConfig(value_clip=0.5))),
    "reward": ObjectiveSettings(REWARD_MODEL, RewardModelConfig()),
    "teacher": policy(0.7, loss=PPO, kl={"placement": "loss", "estimator": "k3"}, teacher={}),
    "full": policy(loss=PPO, kl={"placement": "loss", "estimator": "full"}),
}


@dataclass(frozen=True)
class Case:
    """One arrangement and one way to lay the work out."""

    replicate: int = 1
    sequence_parallel: int = 1
    objective: str = "ppo"
    packed: bool = False
    budget: int = 40
    recompute: bool = False
    compiled: bool = False
    lengths: tuple[int, ...] = LENGTHS
    model: str = "grouped"
    lora: bool = False

    @property
    def on_one_rank(self) -> Case:
        """The same work on one rank."""
        return replace(self, replicate=1, sequence_parallel=1, recompute=False, compiled=False, packed=False)


FOUR = [
    Case(2, packed=True),
    Case(4, objective="sft"),
    Case(1, 2, packed=True, objective="gspo"),
    Case(1, 2, packed=True, recompute=True, objective="kimi", budget=1),
    Case(2, 2, recompute=True, objective="gmpo"),
    Case(1, 4, packed=True, objective="gspo", budget=4096),
    Case(1, 4, lengths=(2,), packed=True, objective="kimi"),
    Case(2, 2, model="window", objective="sft"),
    Case(1, 4, model="gpt2", objective="sft"),
    Case(2, 4, packed=True, objective="value"),
    Case(2, 2, packed=True, objective="reward"),
    Case(2, 2, packed=True, recompute=True, objective="full"),
    Case(2, 2, lora=True),
    Case(2, 2, packed=True, recompute=True, objective="teacher"),
]
TWO = [
    Case(),
    Case(2, objective="gspo"),
    Case(1, 2, packed=True, objective="kimi"),
    Case(2, 2, objective="gmpo", recompute=True),
    Case(2, lora=True),
    Case(1, 2, lora=True, packed=True, objective="sft"),
    Case(1, 2, objective="kimi", packed=True, recompute=True, compiled=True),
    Case(2, lora=True, objective="teacher"),
]
HEADS = {"value": ValueModel, "reward": RewardModel}
"""What the model is where it is no policy."""
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]


def work(lengths: tuple[int, ...]) -> Sequences:
    """Random sequences, their first halves prompts, with every column that an objective may read."""
    rng = np.random.default_rng(3)
    counts = np.array(lengths)
    ends = np.cumsum(counts)
    scored = np.concatenate(
        [np.arange(end - count + max(1, count // 2), end) for count, end in zip(counts, ends, strict=True)]
    )
    total = len(scored)

    def numbers(mean: float, spread: float) -> Any:
        return rng.normal(mean, spread, total).astype(np.float32)

    teacher = torch.randn(total, VOCABULARY, generator=torch.Generator().manual_seed(4))
    top = teacher.log_softmax(-1).topk(5, dim=-1)
    return Sequences(
        rng.integers(0, VOCABULARY, int(counts.sum())).astype(np.int32),
        counts,
        scored,
        {
            "weights": np.full(total, 1 / total, np.float32),
            "advantages": numbers(0.0, 1.0),
            "rollout_logprobs": numbers(-3.0, 0.5),
            "fresh": (np.arange(total) % 3 > 0).astype(np.float32),
            "reference_logprobs": numbers(-3.0, 0.5),
            "returns": numbers(0.0, 1.0),
            "old_values": numbers(0.0, 1.0),
            "answer_tokens": np.full(total, 2, np.float32),
            "kl_weights": np.full(total, 0.1 / total, np.float32),
            "teacher_weights": np.full(total, 0.5 / total, np.float32),
            "teacher_top_ids": top.indices.int().numpy(),
            "teacher_top_logprobs": top.values.numpy(),
            "sequences": np.repeat(
                np.arange(len(counts)), np.diff(np.searchsorted(scored, [0, *ends]))
            ).astype(np.float32),
        },
    )


def command(batches: list[MicroBatch], **fields: Any) -> Frame:
    arrays = {
        name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()
    }
    return Frame("work", 0, {"idle": [batch.idle for batch in batches], **fields}, arrays)


def session(objective: ObjectiveSettings) -> SessionSettings:
    return SessionSettings(
        objective=objective,
        optimizer=OptimizerConfig(epsilon=1e-3, max_grad_norm=0.1),
        batching=BatchingConfig(logprob_chunk_tokens=3),
        seed=0,
        total_updates=1,
    )


def loaded(folder: Path, case: Case) -> ShardedModel:
    mesh = RankMesh.form("cpu", replicate=case.replicate, sequence_parallel=case.sequence_parallel)
    kind = HEADS.get(case.objective, PolicyModel)
    compiled_layers.BACKEND = "aot_eager"  # of this rank alone, which is a process of its own
    model = ShardedModel(folder / case.model, torch.float32, mesh, CPU, kind, frozen=case.lora)
    model.load(folder / case.model)
    check_sequence_parallel(model.policy, model.mesh.width, model.dtype, model.device)
    if kind is not PolicyModel:
        # A head of zeros would leave the body without a gradient.
        with torch.no_grad():
            local(model.causal_lm.score.weight).fill_(0.1)
    if case.lora:
        model.adapt(LoraConfig(rank=4, alpha=8.0), seed=7)
        # With B at zero A would have no gradient.
        model.adapters.set({name: tensor + 0.05 for name, tensor in model.adapters.tensors().items()})
    return model


def weights(model: ShardedModel) -> dict[str, Any]:
    return {
        name: gathered(parameter.detach()).numpy() for name, parameter in model.causal_lm.named_parameters()
    }


def outcomes(folder: Path, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Return the results of this rank in all cases; the cases of one arrangement share a model."""
    models: dict[Any, ShardedModel] = {}
    found = {}
    for case in cases:
        head, moves = HEADS.get(case.objective, PolicyModel), case.objective == "full"
        arrangement = case.model, case.lora, head, moves, case.replicate, case.sequence_parallel
        if arrangement not in models:
            models[arrangement] = loaded(folder, case)
        found[case] = outcome(models[arrangement], case)
    return found


def moved_reference(model: ShardedModel, objective: ObjectiveSettings) -> ReferenceDistribution | None:
    """Make the model the reference, where one is asked for, and move the policy one step away from it."""
    if not objective.compares_distributions:
        return None
    reference = ReferenceDistribution(model, ReferenceWeights(model))
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(1.1)
    return reference


def outcome(model: ShardedModel, case: Case) -> dict[str, Any]:
    """Return all results of an update before its step, and of a scoring call."""
    line = ListeningFront()
    watch = CompilerWatch(line.progress)
    model.recomputed_layers.on, model.compiled_layers.on = case.recompute, case.compiled
    lanes = torch.distributed.get_world_size() // case.sequence_parallel
    lane = torch.distributed.get_rank() // case.sequence_parallel
    per_lane = pack(work(case.lengths), Layout(case.budget, lanes, case.packed))
    asked = command(per_lane[lane], temperature=0.7, chunk_tokens=5, top_k=2, squares=False, in_float32=False)
    ask = values_of if case.objective in HEADS else score
    scores = ask(asked, model, line)
    settings = session(OBJECTIVES[case.objective])
    optimizer = PolicyOptimizer(model, settings.optimizer)
    objective = rank_objective(settings.objective, moved_reference(model, settings.objective))
    update = Update(model, settings, objective, line)
    update.accumulate(command(per_lane[lane]), backward=True)
    optimizer.complete_gradients()
    gradients = {name: gathered(p.grad).numpy().copy() for name, p in model.trainable().items()}
    metrics, (squared_norm,) = update.reduced(optimizer.squared_norm())
    optimizer.discard_gradients()
    model.check_head()  # as the load of the next session does, whatever attention this work left behind
    return {
        "places": np.concatenate([batch.places for batch in per_lane[lane]]),
        "scores": scores,
        "metrics": {**metrics, "squared_norm": squared_norm},
        "gradients": gradients,
        "compilations": watch.taken().get("compilations", 0),
    }


def in_place(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of all ranks in the order of their tokens."""
    answered = [answer for answer in answers if answer["scores"]]
    order = np.concatenate([answer["places"] for answer in answered]).argsort()
    names = answered[0]["scores"]
    return {name: np.concatenate([each["scores"][name] for each in answered])[order] for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mesh")
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    made = {
        "grouped": Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True),
        "window": MistralConfig(**shape | {"num_key_value_heads": 1}, sliding_window=5),
        "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "three-heads": Qwen3Config(
            **shape | {"num_attention_heads": 3, "num_key_value_heads": 3}, head_dim=8
        ),
    }
    for name, config in made.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def expected(folder: Path, on_ranks: OnRanks) -> dict[Case, dict[str, Any]]:
    cases = list({case.on_one_rank for case in (*TWO, *FOUR)})
    return on_ranks(1, lambda: outcomes(folder, cases))[0]


@pytest.fixture(scope="module")
def found(folder: Path, on_ranks: OnRanks) -> dict[tuple[int, Case], list[dict[str, Any]]]:
    """The results of each rank, by number of ranks and case; the ranks are forked once for all cases."""
    return {
        (ranks, case): [each[case] for each in answers]
        for ranks, cases in ((2, TWO), (4, FOUR))
        for answers in [on_ranks(ranks, lambda cases=cases: outcomes(folder, cases))]
        for case in cases
    }


@pytest.mark.parametrize(
    ("ranks", "case"), [(2, case) for case in TWO] + [(4, case) for case in FOUR], ids=str
)
def test_an_update_and_its_scores_are_those_of_one_rank(
    found: dict[tuple[int, Case], list[dict[str, Any]]],
    expected: dict[Case, dict[str, Any]],
    ranks: int,
    case: Case,
) -> None:
    answers, alone = found[ranks, case], expected[case.on_one_rank]
    assert max(np.abs(gradient).max() for gradient in alone["gradients"].values()) > 1e-2
    for each in answers:
        assert (each["compilations"] > 0) == case.compiled
        assert each["metrics"] == pytest.approx(alone["metrics"], rel=TOLERANCE, abs=TOLERANCE)
        for name, value in alone["gradients"].items():
            np.testing.assert_allclose(
                each["gradients"][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
            )
    scores, right = in_place(answers), in_place([alone])
    assert scores.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(scores[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def saved(folder: Path, case: Case, target: Path) -> dict[str, Any]:
    """Take two steps and write a checkpoint; return the weights that it should hold."""
    model, line = loaded(folder, case), ListeningFront()
    settings = session(OBJECTIVES["sft"])
    optimizer = PolicyOptimizer(model, settings.optimizer)
    checkpoints = RankCheckpoints(model, line)
    lane = torch.distributed.get_rank() // case.sequence_parallel
    lanes = torch.distributed.get_world_size() // case.sequence_parallel
    for _ in range(2):
        update = Update(model, settings, Objective(settings.objective), line)
        update.accumulate(command(pack(work(LENGTHS), Layout(40, lanes))[lane]), backward=True)
        _, skipped = finish(update, optimizer, 1e-2)
        assert not skipped
    checkpoints.snapshot({"report": 1, "folder": str(target)}, optimizer, folder / case.model)
    assert line.done.wait(60), "the shards were not written within 60 s"
    assert line.error is None
    torch.distributed.barrier()
    return weights(model)


def restored(folder: Path, case: Case, target: Path) -> tuple[dict[str, Any], float]:
    """Return the weights and the sum of the moments that this arrangement loads from a checkpoint."""
    model = loaded(folder, case)
    optimizer = PolicyOptimizer(model, session(OBJECTIVES["sft"]).optimizer)
    RankCheckpoints(model, ListeningFront()).load(target, optimizer)
    moments = [
        float(gathered(moment).double().sum())
        for parameter in model.parameters()
        for moment in optimizer.moments(parameter).values()
    ]
    assert {optimizer.steps(parameter) for parameter in model.parameters()} == {2}
    return weights(model), sum(moments)


def test_a_checkpoint_holds_each_shard_once_and_is_read_on_any_mesh(
    folder: Path, on_ranks: OnRanks, tmp_path: Path
) -> None:
    target, by_one = tmp_path / "checkpoint", tmp_path / "by-one"
    target.mkdir()
    by_one.mkdir()
    first, *_ = on_ranks(4, lambda: saved(folder, Case(2, 2), target))
    files = sorted(path.name for path in (target / "shards").iterdir())
    assert files == [f"rank-0000{shard}-of-00002.safetensors" for shard in (0, 1)]
    ((alone, *held),) = on_ranks(1, lambda: [saved(folder, Case(), by_one), restored(folder, Case(), target)])
    held += on_ranks(2, lambda: [restored(folder, case, target) for case in (Case(), Case(2))])[0]
    moments = [total for _, total in held]
    assert moments[0] != 0
    assert moments == pytest.approx([moments[0]] * len(held), rel=1e-9)
    for name, value in alone.items():
        np.testing.assert_allclose(first[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    for values, _ in held:
        for name, value in first.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)


def refusal(folder: Path, case: Case) -> str:
    try:
        loaded(folder, case)
    except FailedPrecondition as error:
        return str(error)
    return ""


def test_heads_that_a_lane_does_not_divide_are_refused_with_the_arithmetic(
    folder: Path, on_ranks: OnRanks
) -> None:
    found = on_ranks(2, lambda: refusal(folder, Case(1, 2, model="three-heads")))
    assert found[0] == found[1]
    assert "it has 3 attention heads = 1 x 2 + 1" in found[0]
