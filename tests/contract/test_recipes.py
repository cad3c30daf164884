"""The table of recipes/qwen3 is what the plan says of every size on 1, 2 and 8 GPUs of either card.

No GPU is needed: nvidia-smi is a script, and a model is its published `config.json` with headers of weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from flotilla.coordinator.v1.run_pb2 import Plan
from flotilla_coordinator.plan import plan_run, size_limits
from flotilla_coordinator.plan.placement import placed
from flotilla_core.config import RunConfig, StackConfig, load
from flotilla_core.errors import FailedPrecondition
from flotilla_launch import gpus as gpus_module
from flotilla_testing.host_tools import write_nvidia_smi
from flotilla_testing.model_folders import write_header, write_tokenizer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "qwen3"
CARDS = {"80 GB": 81_559, "141 GB": 143_771}
"""The MiB that nvidia-smi tells of an H100 and of an H200."""
COUNTS = (1, 2, 8)
PROMPT_TOKENS = 256
"""More than the longest problem of GSM8K has with its system prompt; a letter is a token here."""
RUN = load(RunConfig, [RECIPE / "grpo.yaml"])
SYSTEM_PROMPT, PROMPTS = RUN.data.system_prompt, RUN.rollout.prompts_per_step
LAID_OVER = (
    "",
    "optimizer.offload=true",
    "lora.yaml",
)
"""What makes a run smaller, in the order in which a user would try it."""
SHARED = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
}


class Planned(NamedTuple):
    """A size on some GPUs: the first run that fits, and what the plan says of the one in which all weights learn."""

    size: str
    gpus: str
    seats: str
    rank: str
    generator: str
    all_weights: str
    laid_over: str
    warnings: tuple[str, ...]
    """Those of the run that fits."""

    @property
    def row(self) -> str:
        *cells, _ = self
        return f"| {' | '.join(map(str, cells))} |"


def weights(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield name and shape of each tensor, as the published folders have them."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = config.get("num_experts", 0)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        yield from ((f"{place}.{name}_layernorm.weight", [hidden]) for name in ("input", "post_attention"))
        yield from ((f"{place}.self_attn.{name}_norm.weight", [head]) for name in "qk")
        yield f"{place}.self_attn.q_proj.weight", [queries, hidden]
        yield from ((f"{place}.self_attn.{name}_proj.weight", [keys, hidden]) for name in "kv")
        yield f"{place}.self_attn.o_proj.weight", [hidden, queries]
        if experts:
            yield f"{place}.mlp.gate.weight", [experts, hidden]
        for part in [f"experts.{number}." for number in range(experts)] or [""]:
            yield from ((f"{place}.mlp.{part}{name}_proj.weight", [width, hidden]) for name in ("gate", "up"))
            yield f"{place}.mlp.{part}down_proj.weight", [hidden, width]


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Make a folder with the shape of a model, and a tokenizer of letters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_header(folder, dict(weights(config)))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    write_tokenizer(folder, ["_", "<end>", "a", "b"], template=template, eos_token="<end>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A host with room for all checkpoints, data, and the models."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, letter in (("train", "a"), ("test", "b")):
        problem = letter * (PROMPT_TOKENS - len(SYSTEM_PROMPT))
        row = {"prompt": [{"role": "user", "content": problem}], "answer": "7"}
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * PROMPTS)
    for size, shape in SHAPES.items():
        make_model(folder / size, SHARED | shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=":")
        patch.delenv(gpus_module.VISIBLE, raising=False)
        patch.setattr(size_limits, "_GPUS", folder)
        patch.setattr(size_limits, "host_memory", lambda: 2 << 40)
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=8 << 40, used=0, free=8 << 40))
        yield folder


@pytest.fixture(scope="module")
def table(folder: Path) -> list[Planned]:
    rows = []
    for size in SHAPES:
        for card, mebibytes in CARDS.items():
            for count in COUNTS:
                write_nvidia_smi(folder, count, mebibytes)
                rows.append(planned(folder, size, f"{count} x {card}"))
    return rows


def planned(folder: Path, size: str, gpus: str) -> Planned:
    """Plan the run of a size on the GPUs of this host, with what makes it fit laid over it."""
    file = RECIPE / f"stack-{size.lower()}.yaml"
    own = load(StackConfig, [file])
    assert own.model == f"Qwen/Qwen3-{size}"
    try:
        stack = placed(load(StackConfig, [file], [f"model={folder / size}", f"state_dir={folder / 'state'}"]))
    except FailedPrecondition as error:
        return Planned(
            size, gpus, f"`flotilla up` refuses `{error.where}`", "", "", "refused", "more GPUs", ()
        )
    all_weights, laid_over, plan = "", "", Plan()
    for laid_over in LAID_OVER:
        plan = plan_with(laid_over, folder, stack)
        said = "refused" if plan.errors else "warned of" if too_large(plan) else "fits"
        all_weights = all_weights or said
        if said == "fits":
            break
    else:
        raise AssertionError(f"{size} on {gpus}: {plan.errors}, {plan.warnings}")
    lines = {line.name: line for line in plan.lines}
    who = [line.explanation for name, line in lines.items() if name.startswith("GPU ")]
    assert len(who) == int(gpus.partition(" ")[0]), "every GPU is used"
    found = re.search(r"generator-0[^(]*\(up to (.+?), KV cache (.+?) of it", "; ".join(who))
    assert found is not None
    rank = lines["memory of a trainer rank"].value.removeprefix("about ")
    laid = " ".join(f"`{one}`" for one in laid_over.split())
    return Planned(
        size, gpus, seats_of(stack), rank, f"{found[1]}, {found[2]}", all_weights, laid, tuple(plan.warnings)
    )


def plan_with(laid_over: str, folder: Path, stack: StackConfig) -> Plan:
    files = [RECIPE / "grpo.yaml", *(RECIPE / one for one in laid_over.split() if "=" not in one)]
    overrides = [one for one in laid_over.split() if "=" in one]
    data = [f"data.train={folder / 'train.jsonl'}", f"evaluation.data={folder / 'test.jsonl'}"]
    return plan_run(load(RunConfig, files, [*overrides, *data]), stack)


def too_large(plan: Plan) -> bool:
    return any("a trainer rank needs" in warning for warning in plan.warnings)


def seats_of(stack: StackConfig) -> str:
    generator = stack.generator
    if stack.placement == "colocated":
        return "rank and generator on each"
    wide = f" of {generator.tensor_parallel_size} GPUs" if generator.tensor_parallel_size > 1 else ""
    return f"ranks: {stack.trainer.nproc}, generators: {generator.replicas}{wide}"


def test_the_table_of_the_recipe_is_what_the_plan_says(table: list[Planned]) -> None:
    written = [line for line in (RECIPE / "README.md").read_text("utf-8").splitlines() if " GB |" in line]
    rows = [one.row for one in table]
    assert written == rows, "write these rows into its README:\n" + "\n".join(rows)


def test_sizes_are_those_that_the_models_are_named_after() -> None:
    counts = {
        size: sum(rows * (rest[0] if rest else 1) for _, (rows, *rest) in weights(SHARED | shape))
        for size, shape in SHAPES.items()
    }
    assert counts == {
        "0.6B": 596_049_920,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "30B-A3B": 30_532_122_624,
    }


def test_what_fits_has_room_for_its_samples_but_for_adapters_on_one_gpu_as_the_page_says(
    table: list[Planned],
) -> None:
    tight = {(one.size, one.gpus): one.warnings for one in table if one.warnings}
    assert [*tight] == [("8B", "1 x 80 GB"), ("30B-A3B", "1 x 141 GB")]
    for (warning,) in tight.values():
        assert "256 samples in flight" in warning and "samples are set back" in warning


def test_every_size_runs_on_eight_gpus_with_all_weights_learning(table: list[Planned]) -> None:
    eight = {(one.size, one.gpus): one.laid_over for one in table if one.gpus.startswith("8 ")}
    assert len(eight) == len(SHAPES) * len(CARDS)
    assert not any("lora" in laid_over for laid_over in eight.values())
