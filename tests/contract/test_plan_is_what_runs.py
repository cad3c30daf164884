"""The plan's arithmetic against the code that will do the work: the trainer's front and what autograd keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flotilla_coordinator.plan import plan_run
from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts
from flotilla_coordinator.plan.trainer_memory import KEPT_SHARE, layer_activations
from flotilla_coordinator.trainers.spec import session_spec
from flotilla_core.config import LoraConfig, RunConfig, StackConfig, load_text
from flotilla_core.errors import InvalidConfig
from flotilla_testing.model_folders import write_tokenizer
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.front.session_settings import session_settings
from flotilla_trainer.rank import kept_whole
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel

PROMPT = "10+11="
LORA = LoraConfig(rank=8, alpha=8.0)
AWKWARD = [
    # prompts, samples, response tokens, budget, ranks
    (7, 3, 11, 64, 2),
    (13, 5, 1, 97, 3),
    (1, 2, 40, 8192, 4),  # fewer samples than ranks
    (1, 7, 12, 17, 1),  # just one fits
    (1, 7, 12, 16, 5),  # not even one fits
    (31, 2, 29, 61, 7),
    (127, 2, 3, 1, 2),  # the smallest budget
    (64, 8, 31, 2048, 8),
    (11, 11, 7, 144, 11),
    (97, 3, 17, 1009, 6),
]


def model_folder(folder: Path) -> Path:
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=20, max_position_embeddings=64, **shape)).save_pretrained(folder)
    return write_tokenizer(folder, "_0123456789+=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plan")
    (place / "train.jsonl").write_text(json.dumps({"prompt": PROMPT, "answer": "21"}) + "\n")
    model_folder(place / "model")
    return place


def planned_micro_batches(folder: Path, config: RunConfig, ranks: int) -> int:
    stack = StackConfig(model=folder / "model", state_dir=folder, trainer={"nproc": ranks})
    plan = plan_run(config, stack)
    assert not plan.errors
    values = {line.name: line.value for line in plan.lines}
    assert values["updates"] == str(config.steps)
    return int(values["micro-batches of an update"].removeprefix("at most ").removesuffix(" a rank"))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("prompts", "samples", "response", "budget", "ranks"), AWKWARD)
def test_planned_micro_batches_are_those_that_the_front_makes(
    folder: Path, prompts: int, samples: int, response: int, budget: int, ranks: int, packed: bool
) -> None:
    run = {
        "name": "plan",
        "steps": 3,
        "data": {"train": folder / "train.jsonl"},
        "rewards": [{"reward": "exact"}],
        "rollout": {
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "sampling": {"max_response_tokens": response},
        },
        "batching": {"tokens_per_microbatch": budget},
    }
    planned = planned_micro_batches(folder, RunConfig.model_validate(run), ranks)
    layout = Layout(budget, ranks, packed)
    longest = len(PROMPT) + response
    assert len(pack(sequences([longest] * (prompts * samples)), layout)[0]) == planned
    shorter = np.random.default_rng(0).integers(len(PROMPT) + 1, longest + 1, prompts * samples)
    assert len(pack(sequences(shorter.tolist()), layout)[0]) <= planned


@pytest.mark.parametrize("model_class", [Qwen3ForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"], ["lm_head"]])
def test_planned_adapters_are_those_that_the_trainer_makes(
    model_class: type[PreTrainedModel], targets: str | list[str], tmp_path: Path
) -> None:
    run = {
        "name": "plan",
        "steps": 3,
        "algorithm": {"type": "sft"},
        "data": {"train": "train.jsonl"},
        "lora": {"rank": 3, "alpha": 7.0, "targets": targets},
    }
    config = RunConfig.model_validate(run)
    assert config.lora is not None
    settings = session_settings(session_spec(config, tmp_path)).lora
    assert settings == config.lora
    config_class = Qwen3Config if model_class is Qwen3ForCausalLM else LlamaConfig
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = model_class(config_class(**shape, **heads))
    model.save_pretrained(tmp_path)
    planned = AdapterFacts.of(ModelFacts.read(tmp_path), config.lora)
    assert settings is not None
    made = Adapters(model, settings, seed=0, device=torch.device("cpu"))
    assert made.scale == 7 / 3
    assert planned.parameters == sum(tensor.numel() for tensor in made.tensors().values())
    assert planned.layers == len(made.tensors()) // 2
    if targets == "all-linear":
        assert list(planned.names) == made.target_names()


def test_a_run_of_no_updates_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="steps"):
        load_text(RunConfig, "name: none\nsteps: 0\nalgorithm: {type: sft}\ndata: {train: t.jsonl}\n")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_class", [Qwen3ForCausalLM, LlamaForCausalLM])
def test_estimated_activations_are_those_that_autograd_keeps(
    model_class: type[PreTrainedModel], dtype: torch.dtype, tmp_path: Path
) -> None:
    kept, kept_with_adapters = [], []
    for layers in (1, 3):
        config_class = Qwen3Config if model_class is Qwen3ForCausalLM else LlamaConfig
        shape: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 160}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        policy = PolicyModel(model_class(config_class(**shape, **heads, num_hidden_layers=layers)).to(dtype))
        kept.append(_kept_bytes(policy, tokens=64))
        policy.requires_grad_(False)
        adapters = Adapters(policy.causal_lm, LORA, seed=0, device=torch.device("cpu"))
        own = [*policy.parameters(), *adapters.named_parameters().values()]
        kept_with_adapters.append(_kept_bytes(policy, tokens=64, own=own))
    policy.causal_lm.save_pretrained(tmp_path)
    facts = ModelFacts.read(tmp_path)
    estimate = layer_activations(facts, dtype.itemsize)
    assert estimate == pytest.approx((kept[1] - kept[0]) / 2 / 64, rel=0.02)
    planned = AdapterFacts.of(facts, LoraConfig(rank=LORA.rank))
    estimate = layer_activations(facts, dtype.itemsize, planned)
    assert 0.95 < estimate / ((kept_with_adapters[1] - kept_with_adapters[0]) / 2 / 64) < 1.2


def test_the_plan_leaves_the_room_in_which_ranks_keep_weights_whole() -> None:
    assert KEPT_SHARE == kept_whole.SHARE


def _kept_bytes(policy: PolicyModel, tokens: int, own: list[torch.Tensor] | None = None) -> int:
    """Bytes that the forward pass of one packed row saves for the backward pass, parameters left out."""
    places = {parameter.untyped_storage().data_ptr() for parameter in own or policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in places:
            kept[place] = tensor
        return tensor

    row = PackedRow.of([tokens // 2] * 2, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.hidden_states(torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens), row)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def sequences(lengths: list[int]) -> Sequences:
    ends = np.cumsum(lengths)
    return Sequences(np.zeros(ends[-1], np.int32), np.array(lengths), ends - 1)
