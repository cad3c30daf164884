"""The plan: its arithmetic is right, and what could not work is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.plan import plan_run, remarks, size_limits
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.size_limits import MOST_GROUPS, MOST_SAMPLES
from flotilla_coordinator.plan.trainer_memory import TrainerMemory
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.findings import info, warning
from flotilla_testing.model_folders import write_header, write_tokenizer

RECOMPUTED = {"activation_checkpointing": True, "tokens_per_microbatch": 4096}
PARAMETERS = {"embed": [20, 8], "layer": [3, 8, 8]}
SUPERVISED = {"algorithm": {"type": "sft"}, "evaluation": None, "rewards": []}


def make_model(folder: Path, **changes: object) -> Path:
    write_tokenizer(folder, "_0123456789+=")
    config = {
        "model_type": "qwen3",
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 20,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    write_header(folder, PARAMETERS, "F32")
    return folder


@pytest.fixture
def stack(tmp_path: Path) -> StackConfig:
    return StackConfig(model=make_model(tmp_path / "model"), state_dir=tmp_path / "state")


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    write(tmp_path / "train.jsonl", range(10, 50))
    write(tmp_path / "heldout.jsonl", range(60, 70))
    return {
        "name": "count",
        "steps": 100,
        "data": {"train": tmp_path / "train.jsonl"},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 4, "sampling": {"max_response_tokens": 12}},
        "rewards": [{"reward": "exact"}],
        "batching": {"tokens_per_microbatch": 64},
        "evaluation": {"data": tmp_path / "heldout.jsonl", "every_steps": 30},
    }


def write(path: Path, numbers: range) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in numbers))


def plan(run: dict[str, Any], stack: StackConfig, **changes: Any) -> run_pb2.Plan:
    return plan_run(RunConfig.model_validate(run | changes), stack)


def the_error(planned: run_pb2.Plan) -> str:
    (error,) = planned.errors
    return error


def test_the_arithmetic_of_a_run(run: dict[str, Any], stack: StackConfig) -> None:
    stack = stack.model_copy(update={"trainer": stack.trainer.model_copy(update={"nproc": 2})})
    run["data"]["rest_epochs"] = 15
    planned = plan(run, stack)
    assert (list(planned.errors), list(planned.warnings)) == ([], [])
    values = {line.name: line.value for line in planned.lines}
    assert values["model"] == "352 parameters"
    assert values["starting weights"] == str(stack.model)
    assert values["data"] == "40 prompts"
    assert values["step"] == "64 samples"
    assert values["tokens of a step"] == "at most 1,088"  # 64 x (5 + 12)
    assert values["updates"] == "100"
    assert values["micro-batches of an update"] == "at most 8 a rank"  # 64 // 16 fed = 4 together
    assert values["evaluations"] == "5 x 10 prompts"  # before, at 30, 60 and 90, after
    data = next(line.explanation for line in planned.lines if line.name == "data")
    assert "at least 40.00 epochs" in data and data.endswith("solved prompts rest for up to 15 epochs")


def test_a_greedy_response_to_each_prompt_is_a_line_and_counts_for_no_update(
    run: dict[str, Any], stack: StackConfig
) -> None:
    lines = {line.name: line for line in plan(run, stack, algorithm={"type": "remax"}).lines}
    assert lines["greedy responses"].value == "1 a prompt"
    assert "in addition to its 4 samples" in lines["greedy responses"].explanation
    assert (lines["step"].value, lines["tokens of a step"].value) == ("64 samples", "at most 1,088")
    assert "greedy responses" not in {line.name for line in plan(run, stack).lines}


def test_an_evaluation_at_the_last_step_is_the_one_after(run: dict[str, Any], stack: StackConfig) -> None:
    run["evaluation"]["every_steps"] = 50
    assert {line.name: line.value for line in plan(run, stack).lines}["evaluations"] == "3 x 10 prompts"


def test_supervised_training_needs_answers_and_no_generators(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    assert "no end-of-sequence token" in the_error(plan(run, stack, **SUPERVISED))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "_"}')
    idle = stack.model_copy(update={"generator": stack.generator.model_copy(update={"replicas": 0})})
    planned = plan(run, idle, **SUPERVISED)
    assert (list(planned.errors), list(planned.warnings)) == ([], [])
    assert {line.name: line.value for line in planned.lines}["step"] == "16 sequences"
    assert "flotilla scale generator 1" in plan(run, idle).warnings[0]
    of_generators = "memory of a generator worker"
    assert of_generators not in {line.name for line in (*planned.lines, *plan(run, idle).lines)}
    assert of_generators in {line.name for line in plan(run, stack, **SUPERVISED).lines}
    direct = stack.model_copy(
        update={"generator": stack.generator.model_copy(update={"apply_weights": "direct"})}
    )
    kept = {line.name: line.explanation for line in plan(run, direct, **SUPERVISED).lines}[of_generators]
    assert kept.startswith("live float32 weights, which new ones overwrite"), kept
    first = next(line for line in planned.lines if line.name == "first row")
    assert (first.value, first.explanation) == (
        "row 1 of 40: 3 of 8 tokens are learned",
        "10+1=>>>11_<<<",
    )
    run["data"]["answer_field"] = "solution"
    assert "column 'solution' is missing" in the_error(plan(run, stack, **SUPERVISED))


def test_answers_that_would_end_otherwise_than_responses_do_are_warned_of(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "+"}')
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [12, 1]}')
    (warning,) = plan(run, stack, **SUPERVISED).warnings
    assert "eos_token '+' (11)" in warning and "with '=' (12) or '0' (1)" in warning
    assert not any("eos_token" in text for text in plan(run, stack).warnings)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [12, 11]}')
    assert not plan(run, stack, **SUPERVISED).warnings


def test_a_reward_model_needs_a_trainer_alone_and_feeds_every_token(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(10, 50)]
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    services = {"generator": stack.generator, "reward": stack.reward}
    none = {name: section.model_copy(update={"replicas": 0}) for name, section in services.items()}
    alone = stack.model_copy(update=none | {"model": make_model(tmp_path / "ending", eos_token_id=0)})
    changes = {"rewards": [], "rollout": {"prompts_per_step": 16}, "batching": {"tokens_per_microbatch": 16}}
    made = {name: plan(run, alone, algorithm={"type": name}, **changes) for name in ("dpo", "reward_model")}
    assert [list(planned.errors) for planned in made.values()] == [[], []]
    lines = {name: {line.name: line for line in planned.lines} for name, planned in made.items()}
    ours = lines["reward_model"]
    assert (ours["step"].value, ours["evaluations"].value) == ("32 sequences", "5 x 40 pairs")
    # 5 of the prompt, 2 of the answer and its end: 8 tokens are fed, so that two go together; a policy feeds 7.
    assert "8 tokens each" in ours["micro-batches of an update"].explanation
    assert ours["micro-batches of an update"].value == "at most 16 a rank"
    assert "7 tokens each" in lines["dpo"]["micro-batches of an update"].explanation
    assert "logits" not in ours["memory of a trainer rank"].explanation
    assert "weight sync" not in ours


def test_answers_that_the_model_cannot_hold_are_refused(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "_"}')
    for digits, errors in ((58, []), (59, ["65 tokens, the model has 64"])):
        line = json.dumps({"prompt": "10+1=", "answer": "1" * digits})
        (tmp_path / "train.jsonl").write_text(line + "\n")
        found = plan(run, stack, **SUPERVISED).errors
        assert [wanted in error for wanted, error in zip(errors, found, strict=True)] == [True] * len(errors)


def test_a_critic_needs_a_gang_and_is_told_of(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    run["algorithm"] = {"type": "ppo", "critic": {"warmup_steps": 10}}
    assert "the stack has no critic: write `critic: {replicas: 1}`" in the_error(plan(run, stack))
    stack = stack.model_copy(update={"critic": stack.critic.model_copy(update={"replicas": 1})})
    planned = plan(run, stack)
    assert list(planned.errors) == []
    lines = {line.name: line for line in planned.lines}
    assert lines["updates"].value == "90"
    assert lines["critic"].value == "learning rate 1e-05"
    told = lines["critic"].explanation
    assert str(stack.model) in told and "the first 10 steps teach it alone" in told
    assert "KiB" in lines["memory of a critic rank"].value

    other = make_model(tmp_path / "other")
    own = stack.model_copy(update={"critic": stack.critic.model_copy(update={"model": other})})
    explained = {line.name: line.explanation for line in plan(run, own).lines}
    assert f"starts from {other} (stack: critic.model)" in explained["critic"]
    run["algorithm"]["critic"] = {"warmup_steps": 100}
    assert "leaves none of the 100 steps" in the_error(plan(run, stack))
    run["algorithm"]["critic"] = {"optimizer": {"warmup_updates": 100}}
    assert "algorithm.critic.optimizer.warmup_updates = 100" in the_error(plan(run, stack))


def test_no_updates_are_no_plan(run: dict[str, Any], stack: StackConfig) -> None:
    with pytest.raises(ValueError, match="steps"):
        plan(run, stack, steps=0)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"batching": RECOMPUTED}, "activations"),
        ({"batching": RECOMPUTED | {"activation_offload": True}}, "activations"),
        ({"optimizer": {"offload": True}}, "AdamW"),
        ({"batching": {"logprob_chunk_tokens": 16, "tokens_per_microbatch": 4096}}, "logits"),
    ],
)
def test_what_saves_memory_is_in_the_estimate(
    run: dict[str, Any], stack: StackConfig, changes: dict[str, Any], part: str
) -> None:
    def need(**changed: Any) -> TrainerMemory:
        model = ModelFacts.read(Path(stack.model))
        wide = replace(model, parameters=10**9, outer_parameters=10**8)
        return TrainerMemory.of(wide, RunConfig.model_validate(run | changed), stack.trainer, 64)

    name = {"AdamW": "moments"}.get(part, part)
    run["batching"] = {"tokens_per_microbatch": 4096}
    assert getattr(need(**changes), name) < getattr(need(), name)
    assert need(**changes).total < need().total
    line = next(line for line in plan(run, stack).lines if line.name == "memory of a trainer rank")
    assert part in line.explanation


def test_a_mesh_changes_micro_batches_and_memory(run: dict[str, Any], stack: StackConfig) -> None:
    def planned(**trainer: int) -> tuple[run_pb2.Plan, TrainerMemory]:
        meshed = stack.model_copy(update={"trainer": stack.trainer.model_copy(update=trainer)})
        config = RunConfig.model_validate(run)
        return plan(run, meshed), TrainerMemory.of(
            ModelFacts.read(Path(stack.model)), config, meshed.trainer, 17
        )

    run["batching"] = {"tokens_per_microbatch": 64, "logprob_chunk_tokens": 8}
    (plain, four), (meshed, shared) = planned(nproc=4), planned(nproc=4, replicate=2, sequence_parallel=2)
    assert (shared.masters, shared.moments) == (2 * four.masters, 2 * four.moments)
    assert (2 * shared.activations, shared.logits) == (four.activations, four.logits)
    lines = [{line.name: line for line in each.lines} for each in (plain, meshed)]
    assert [each["micro-batches of an update"].value for each in lines] == [
        "at most 4 a rank",
        "at most 8 a rank",
    ]
    assert "2 copies on 2 ranks each" in lines[1]["trainer"].explanation
    refused, _ = planned(nproc=4, sequence_parallel=4)
    assert "2 attention heads = 0 x 4 + 2" in the_error(refused)


def test_comparing_whole_distributions_or_likeliest_tokens_needs_memory(
    run: dict[str, Any], stack: StackConfig
) -> None:
    def need(**algorithm: Any) -> TrainerMemory:
        config = RunConfig.model_validate(run | {"algorithm": algorithm})
        return TrainerMemory.of(ModelFacts.read(Path(stack.model)), config, stack.trainer, 64)

    sampled, whole = (need(kl={"placement": "loss", "estimator": one}) for one in ("k3", "full"))
    assert whole.reference > sampled.reference > 0
    named, others = (need(teacher={"top_k": 2, "tail": tail}) for tail in (False, True))
    assert need(teacher={"top_k": 4}).logits > others.logits > named.logits > need().logits


@pytest.fixture
def layered(stack: StackConfig) -> StackConfig:
    """A stack whose model has three layers of linear ones by the names that transformers gives them."""
    inner = {"self_attn.q_proj": [8, 8], "self_attn.k_proj": [4, 8], "mlp.up_proj": [32, 8], "norm": [8]}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(3) for name, shape in inner.items()}
    outer = {"model.embed_tokens.weight": [20, 8], "model.norm.weight": [8], "lm_head.weight": [20, 8]}
    write_header(Path(stack.model), outer | shapes, "F32")
    return stack


def test_a_plan_of_adapters_counts_what_learns_and_what_moves(
    run: dict[str, Any], layered: StackConfig
) -> None:
    def lines(**lora: Any) -> dict[str, run_pb2.PlanLine]:
        planned = plan(run, layered, lora={"rank": 2, **lora})
        assert (list(planned.errors), list(planned.warnings)) == ([], [])
        return {line.name: line for line in planned.lines}

    everywhere = lines()
    numbers = 3 * 2 * ((8 + 8) + (4 + 8) + (32 + 8))
    assert everywhere["trainable"].value == f"{numbers} parameters"
    assert "on 9 linear layers (k_proj, q_proj, up_proj)" in everywhere["trainable"].explanation
    assert everywhere["weight sync"].value == f"{numbers * 4 / 1024:.3g} KiB"
    assert (
        "of the host for those under the adapters" in everywhere["memory of a generator worker"].explanation
    )
    assert lines(targets=["q_proj", "lm_head"])["trainable"].value == "152 parameters"
    assert "trainable" not in {line.name for line in plan(run, layered).lines}


def test_adapters_cost_the_memory_of_a_frozen_model_and_little_more(
    run: dict[str, Any], layered: StackConfig
) -> None:
    def need(nproc: int = 2, dtype: str = "bfloat16", **changes: Any) -> TrainerMemory:
        model = replace(ModelFacts.read(Path(layered.model)), parameters=10**9, outer_parameters=10**8)
        trainer = layered.trainer.model_copy(update={"nproc": nproc, "dtype": dtype})
        return TrainerMemory.of(model, RunConfig.model_validate(run | changes), trainer, 64)

    kl = {"type": "grpo", "kl": {"placement": "loss", "coefficient": 0.1}}
    numbers, of_all, frozen = 3 * 2 * 68, need(algorithm=kl), need(algorithm=kl, lora={"rank": 2})
    assert frozen.masters == 10**9 // 2 * 2 + numbers * 4
    assert (frozen.gradients, frozen.moments, frozen.reference) == (numbers * 4, numbers * 8, numbers * 4)
    assert of_all.masters == of_all.gradients == of_all.reference == 10**9 // 2 * 4
    assert of_all.gathered - frozen.gathered == 10**8 * 2
    assert frozen.activations > of_all.activations


def test_adapters_that_fit_no_layer_are_refused(run: dict[str, Any], layered: StackConfig) -> None:
    error = the_error(plan(run, layered, lora={"targets": ["q_proj", "query"]}))
    assert "no linear layer 'query'; its layers have k_proj, q_proj, up_proj" in error
    assert "proj'" in the_error(plan(run, layered, lora={"targets": ["proj"]}))
    assert "no adapter_config.json" in the_error(plan(run, layered, lora={"adapter": "/nowhere"}))
    assert "File name too long" in the_error(plan(run, layered, lora={"adapter": "/x" * 2048}))


def test_the_plan_counts_optimizer_steps_and_no_group_is_divided(
    run: dict[str, Any], stack: StackConfig
) -> None:
    run["rollout"]["prompts_per_step"] = 4
    lines = {line.name: line for line in plan(run, stack, optimizer={"steps_per_update": 2}).lines}
    assert lines["optimizer steps"].value == "2 an update"
    with pytest.raises(ValueError, match="has 4 groups and none is divided"):
        plan(run, stack, optimizer={"steps_per_update": 5})


def test_a_schedule_that_never_leaves_its_warm_up_is_refused(run: dict[str, Any], stack: StackConfig) -> None:
    planned = plan(run, stack, optimizer={"warmup_updates": 100})
    assert "optimizer.warmup_updates = 100" in the_error(planned)


def test_the_plan_shows_the_preset_resolved(run: dict[str, Any], stack: StackConfig) -> None:
    algorithm = {"type": "dapo", "loss": {"clip_low": 0.1}, "kl": {"placement": "loss", "coefficient": 0.01}}
    lines = {line.name: line for line in plan(run, stack, algorithm=algorithm).lines}
    assert lines["algorithm"].value == "dapo"
    assert lines["loss"].value == "ppo"
    assert lines["loss"].explanation == "clip_low 0.1, clip_high 0.28"
    assert "drop_uniform_groups yes" in lines["advantage"].explanation
    assert lines["aggregation"].value == "token_mean"
    assert lines["divergence"].value == "in the loss"
    assert "frozen reference" in lines["memory of a trainer rank"].explanation
    assert "correction" not in lines


def test_a_function_that_its_file_does_not_define_is_refused(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def other(tokens):\n    return tokens.logprobs\n")
    for section in ("loss", "advantage"):
        error = the_error(plan(run, stack, algorithm={section: {"type": f"{file}:mine"}}))
        assert error.startswith(f"algorithm.{section}.type: {file} defines no function mine")
        assert plan(run, stack, algorithm={section: {"type": f"{file}:other"}}).errors == []


def test_missing_files_are_named(run: dict[str, Any], stack: StackConfig, tmp_path: Path) -> None:
    assert "nowhere" in the_error(plan(run, stack.model_copy(update={"model": tmp_path / "nowhere"})))
    assert "nowhere.jsonl" in the_error(plan(run, stack, data={"train": tmp_path / "nowhere.jsonl"}))
    assert "nowhere.jsonl" in the_error(plan(run, stack, evaluation={"data": tmp_path / "nowhere.jsonl"}))
    (Path(stack.model) / "model.safetensors").unlink()
    assert "no *.safetensors" in the_error(plan(run, stack))


def test_damaged_weights_are_named(run: dict[str, Any], stack: StackConfig) -> None:
    (Path(stack.model) / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    assert "damaged" in the_error(plan(run, stack))


def test_a_reward_that_its_file_does_not_define_is_refused(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from beside import other\n\ndef score(prompt, response, **more): ...\n")
    (tmp_path / "beside.py").write_text("def other(prompt, response, answer, info): ...\n")
    for function in ("score", "other"):
        assert plan(run, stack, rewards=[{"reward": f"{file}:{function}"}]).errors == []
    assert "defines no function missing" in the_error(
        plan(run, stack, rewards=[{"reward": f"{file}:missing"}])
    )
    assert "no.py does not exist" in the_error(plan(run, stack, rewards=[{"reward": f"{tmp_path}/no.py:f"}]))
    file.write_text("def (:\n")
    assert "is not Python" in the_error(plan(run, stack, rewards=[{"reward": f"{file}:score"}]))


def test_weights_of_another_shape_are_refused(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", hidden_size=16)
    assert "initial_weights has hidden_size = 16" in the_error(plan(run, stack, initial_weights=other))
    small = make_model(tmp_path / "small", vocab_size=4)
    assert "13 tokens, the model has 4" in the_error(plan(run, stack.model_copy(update={"model": small})))


def test_the_start_of_a_run_says_from_which_weights(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    (told,) = remarks(plan(run, stack))
    assert told == info(
        f"starting weights: {stack.model} (the stack's model as it is; initial_weights starts from others)"
    )
    warm = make_model(tmp_path / "warm")
    run["rollout"]["prompts_per_step"] = 64
    told, other = remarks(planned := plan(run, stack, initial_weights=warm))
    assert (told, other) == (info(f"starting weights: {warm} (initial_weights)"), warning(other.what))
    assert [*remarks(planned, forked=True)] == [other]


def test_what_may_surprise_is_a_warning(run: dict[str, Any], stack: StackConfig, tmp_path: Path) -> None:
    write(tmp_path / "heldout.jsonl", range(45, 55))
    run["rollout"]["prompts_per_step"] = 64
    run["batching"]["tokens_per_microbatch"] = 15
    repeated, budget, overlap = plan(run, stack).warnings
    assert "prompts repeat within a step" in repeated
    assert "a micro-batch of its own" in budget
    assert "5 of 10 held-out prompts are also in the training data" in overlap


def test_held_out_episodes_are_compared_by_whole_rows(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    for name, seeds in (("train", range(40)), ("heldout", range(38, 48))):
        rows = (json.dumps({"prompt": "1+1=", "seed": seed}) + "\n" for seed in seeds)
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    for shared, more in ((10, {}), (2, {"environment": {"name": "calculator", "episode_tokens": 64}})):
        assert any(one.startswith(f"{shared} of 10 held-out") for one in plan(run, stack, **more).warnings)


def test_a_clip_narrower_than_the_noise_of_an_engine_is_a_warning(
    run: dict[str, Any], stack: StackConfig
) -> None:
    def warned(**algorithm: Any) -> bool:
        plan = plan_run(RunConfig.model_validate(run | {"algorithm": algorithm}), stack)
        assert not plan.errors
        return any("proximal rollout" in warning for warning in plan.warnings)

    assert not warned(type="gspo")
    assert warned(type="gspo", correction={"proximal": "rollout"})
    assert warned(type="grpo", loss={"type": "gspo"})
    assert not warned(type="grpo")


def test_an_estimator_without_a_gradient_is_warned_of_in_the_loss(
    run: dict[str, Any], stack: StackConfig
) -> None:
    def warned(**kl: str) -> bool:
        run["algorithm"] = {"kl": kl}
        return any("estimator k1" in warning for warning in plan(run, stack).warnings)

    assert warned(placement="loss", estimator="k1")
    assert not warned(placement="loss", estimator="k2")
    assert not warned(placement="reward", estimator="k1")
    assert not warned()


def test_a_mixture_says_how_often_each_set_is_repeated(
    run: dict[str, Any], stack: StackConfig, tmp_path: Path
) -> None:
    write(tmp_path / "few.jsonl", range(70, 80))
    run["data"] = {
        "train": [{"path": tmp_path / "train.jsonl", "weight": 3}, {"path": tmp_path / "few.jsonl"}]
    }
    lines = {line.name: line for line in plan(run, stack).lines}
    assert lines["data"].value == "50 prompts"
    assert lines["data set train"].explanation.startswith("75.0% of the draws, about 30.00 epochs")
    assert (lines["data set few"].value, "40.00 epochs" in lines["data set few"].explanation) == (
        "10 prompts",
        True,
    )


def test_what_a_step_draws_at_most_is_counted(run: dict[str, Any], stack: StackConfig) -> None:
    run["rollout"] |= {"over_issue": 0.3, "max_staleness": 2}
    lines = {line.name: line for line in plan(run, stack).lines}
    assert lines["prompts drawn for a step"].value == "at most 21"  # 16 x 1.3 = 20.8
    assert (
        lines["groups under way"].value == "at most 37"
    )  # 2 steps x 16 and 5 more: one step is kept for waiting
    assert lines["step"].value == "64 samples"
    run["rollout"]["dynamic_sampling"] = {"max_prompts_per_step": 100}
    lines = {line.name: line for line in plan(run, stack).lines}
    assert lines["prompts drawn for a step"].value == "at most 100"
    assert "groups of equal rewards are replaced" in lines["prompts drawn for a step"].explanation


def test_draws_that_do_not_fit_the_run_are_warned_of(run: dict[str, Any], stack: StackConfig) -> None:
    run["rollout"] |= {"over_issue": 0.5, "dynamic_sampling": {}}
    on_policy, learns_anyway = plan(run, stack, algorithm={"type": "reinforce"}).warnings
    assert "long responses are lost" in on_policy
    assert "from which advantage reinforce would learn as well" in learns_anyway


GIB = 1 << 30


@pytest.fixture
def long_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackConfig:
    """A model of long sequences on a host with 64 GiB."""
    monkeypatch.setattr(size_limits, "host_memory", lambda: 64 * GIB)
    model = make_model(tmp_path / "long-model", max_position_embeddings=20_000_000)
    return StackConfig(model=model, state_dir=tmp_path / "state")


def rollout(**changes: Any) -> dict[str, Any]:
    return {
        "prompts_per_step": 16,
        "samples_per_prompt": 4,
        "sampling": {"max_response_tokens": 12},
    } | changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rollout": rollout(prompts_per_step=50_000, max_staleness=4)},
            [
                "250,000 groups",
                f"{MOST_GROUPS:,} is the limit",
                "prompts_per_step = 50000",
                "max_staleness = 4",
            ],
        ),
        (
            {"rollout": rollout(prompts_per_step=1000, samples_per_prompt=10_000)},
            ["10,000,000 samples", f"{MOST_SAMPLES:,} is the limit", "rollout.samples_per_prompt = 10000"],
        ),
        (
            {"rollout": rollout(prompts_per_step=10_000, sampling={"max_response_tokens": 1_000_000})},
            ["GiB in the coordinator", "64 GiB", "rollout.sampling.max_response_tokens = 1000000"],
        ),
        (
            {"steps": 10_000_000, "rollout": rollout(prompts_per_step=100_000)},
            ["the ledger's rows", "steps = 10000000", "rollout.prompts_per_step = 100000"],
        ),
    ],
    ids=["groups", "samples", "memory", "ledger"],
)
def test_a_size_that_cannot_fit_is_refused(
    run: dict[str, Any], long_stack: StackConfig, changes: dict[str, Any], told: list[str]
) -> None:
    errors = plan(run, long_stack, **changes).errors
    assert any(all(words in error for words in told) for error in errors), list(errors)


def test_ranks_that_the_host_cannot_hold_are_refused(
    run: dict[str, Any], long_stack: StackConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "host_memory", lambda: GIB)
    batching = {"tokens_per_microbatch": 10_000_000, "logprob_chunk_tokens": 10_000_000}
    many = rollout(prompts_per_step=10_000, sampling={"max_response_tokens": 100})
    error = the_error(plan(run, long_stack, batching=batching, rollout=many))
    assert "1 trainer rank needs about" in error and "1 GiB and no GPU" in error
    assert "batching.tokens_per_microbatch = 10000000" in error


def test_an_evaluation_that_cannot_fit_is_refused(
    run: dict[str, Any], long_stack: StackConfig, tmp_path: Path
) -> None:
    asked = {"data": tmp_path / "heldout.jsonl", "temperature": 1.0, "samples_per_prompt": 10_000}
    errors = plan(run, long_stack, evaluation=asked | {"max_prompts": 100_000}).errors
    assert any(
        "1,000,000,000 answers" in error and "evaluation.max_prompts = 100000" in error for error in errors
    )
    errors = plan(
        run, long_stack, evaluation=asked | {"max_prompts": 10, "max_response_tokens": 10_000_000}
    ).errors
    assert any("evaluation.max_response_tokens = 10000000" in error and "64 GiB" in error for error in errors)


def test_a_size_beyond_every_host_is_refused_by_the_file_alone() -> None:
    with pytest.raises(ValueError, match="less than or equal to 100000"):
        RunConfig.model_validate({"rollout": {"prompts_per_step": 1_000_000_000}})


def test_a_large_run_of_real_work_fits(run: dict[str, Any], long_stack: StackConfig) -> None:
    large = rollout(
        prompts_per_step=12_500, samples_per_prompt=8, max_staleness=4, sampling={"max_response_tokens": 8192}
    )
    planned = plan(run, long_stack, rollout=large)
    assert not [error for error in planned.errors if "limit" in error or "coordinator" in error]


def test_the_disk_counts_whole_so_that_a_run_that_fitted_is_not_refused_later(
    run: dict[str, Any], long_stack: StackConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(total=10 * GIB, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert not plan(run, long_stack).errors
    errors = plan(run, long_stack, steps=1_000_000).errors
    assert any("10 GiB in all" in error for error in errors)
