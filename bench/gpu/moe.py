"""Train a mixture of experts through the whole fleet on GPUs in bfloat16, and fail where a sync failed.

A Qwen3-MoE of 0.75 billion parameters (1.5 GB: 12 layers, 16 experts of which a token visits 4) with random weights,
whose head is scaled until a sampled token is likely: flat distributions would hide stale weights from the canary. The
fleet is started as a user would, digests and canary are on. Prints one JSON object for the start, for each step and for
the verdict, writes them to `figures.jsonl`, and exits with 1 unless every step synced, the canary agreed, and no commit
after the first loaded the model anew. `python bench/gpu/moe.py --out DIR`; with `--cpu` a small shape in float32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from figures import say

from flotilla_testing.stack import Stack, running_stack

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
}
SMALL = SHAPE | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LIKELY = 0.35
"""Mean probability that a token sampled from the random model has at least."""
LEARNING_RATE = 1.0e-5
ANEW = "every commit loads the whole model anew"
RUN_LIMIT_S = 420.0
FIGURES = (
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "sync/bytes",
    "sync/stage_s",
    "sync/stall_s",
    "canary/mean",
    "canary/max",
    "canary/logprob_mean",
    "probs_diff/mean",
    "probs_diff/max",
    "grad_norm",
)


def main() -> int:
    """Make the model, up, run, down, judge."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--ranks", type=int, default=1, help="ranks of the trainer, each with a GPU of its own")
    cli.add_argument("--colocated", action="store_true", help="a generator on the GPU of each trainer rank")
    cli.add_argument("--cpu", action="store_true", help="a small shape in float32, without a GPU")
    asked = cli.parse_args()
    work: Path = asked.out / "work"
    work.mkdir(parents=True)
    started = time.monotonic()
    for script, name in (("make_model.py", "tokenizer"), ("make_data.py", "data")):
        script_file = ROOT / "examples/arithmetic" / script
        subprocess.run([sys.executable, script_file, "--out", work / name], check=True, stdout=sys.stderr)
    dtype = "float32" if asked.cpu else "bfloat16"
    likely = _make_model(work / "model", work / "tokenizer", SMALL if asked.cpu else SHAPE, dtype)
    say(asked.out, made_s=round(time.monotonic() - started, 1), mean_probability=round(likely, 3))
    description: dict[str, Any] = {
        "name": "moe",
        "model": str(work / "model"),
        "generator": {"dtype": dtype, "max_model_tokens": 512},
        "trainer": {"dtype": dtype, "nproc": asked.ranks},
    }
    if asked.cpu:
        description["ready_timeout_s"] = 480
    if asked.colocated:
        description["placement"] = "colocated"
        description["generator"]["replicas"] = asked.ranks
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(asked.ranks)))
    elif not asked.cpu:
        description["generator"]["memory_fraction"] = 0.4
    started = time.monotonic()
    try:
        with running_stack(description, work) as stack:
            say(asked.out, up_s=round(time.monotonic() - started, 1))
            steps, state = _run(stack, work, asked.out, asked.steps)
    finally:
        logs = sorted((work / "state" / "moe" / "logs").glob("*.log"))
        for log in logs:
            shutil.copy(log, asked.out / log.name)
        shutil.rmtree(work / "model", ignore_errors=True)
    anew = [log.name for log in logs if ANEW in log.read_text(errors="replace")]
    failures = _failures(steps, state, asked.steps, [] if asked.cpu else anew)
    say(asked.out, ok=not failures, failures=failures, steps=len(steps))
    return 1 if failures else 0


def _failures(steps: list[dict[str, Any]], state: str, asked: int, anew: list[str]) -> list[str]:
    """Say what is wrong with the run."""
    found = [f"the run {state}"] * (state != "succeeded")
    found += [f"{len(steps)} of {asked} steps"] * (len(steps) != asked)
    found += [f"{log}: {ANEW}" for log in anew]
    for step in steps:
        if not step.get("sync/bytes"):
            found.append(f"step {step['step']} synced nothing")
        if step.get("canary/mean") is None:
            found.append(f"step {step['step']} has no canary")
    return found


def _run(stack: Stack, work: Path, out: Path, steps: int) -> tuple[list[dict[str, Any]], str]:
    """Run GRPO on rewards that a coin decides: they mean nothing, and every update changes the weights."""
    (work / "coin.py").write_text(
        "import random\n\n\ndef coin(prompt, response, answer, info):\n    return float(random.random() < 0.5)\n"
    )
    run = {
        "name": "moe",
        "steps": steps,
        "data": {"train": str(work / "data" / "rl.jsonl")},
        "rewards": [{"reward": f"{work / 'coin.py'}:coin"}],
        "optimizer": {"schedule": "constant", "learning_rate": LEARNING_RATE},
        "rollout": {
            "prompts_per_step": 16,
            "samples_per_prompt": 8,
            "sampling": {"max_response_tokens": 64},
        },
        "weights": {"canary": {"prompts": 16, "tokens": 32}},
        "export_final": False,
    }
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    finished = stack.run(file, timeout_s=RUN_LIMIT_S)
    say(out, state=finished["state"], reason=finished["reason"])
    metrics: list[dict[str, Any]] = list(stack.metrics(finished))
    for step in metrics:
        say(out, step=step["step"], **{figure: step.get(figure) for figure in FIGURES})
    return metrics, str(finished["state"])


def random_model(shape: dict[str, Any]) -> tuple[Any, float]:
    """Return a model with random weights and a sharp head, and the mean probability of what it would sample."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **shape, norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0
    )
    model = Qwen3MoeForCausalLM(config).eval()
    prompts = torch.randint(3, 16, (16, 8))
    likely = 0.0
    with torch.no_grad():
        while likely < LIKELY:
            model.lm_head.weight.mul_(1.25)
            probabilities = model(prompts).logits.float().softmax(-1)
            # The mean probability of a token that is drawn from a distribution is its sum of squares.
            likely = float(probabilities.square().sum(-1).mean())
    return model, likely


def _make_model(folder: Path, tokenizer: Path, shape: dict[str, Any], dtype: str) -> float:
    """Write such a model with the example's tokenizer; return the mean probability."""
    import torch

    model, likely = random_model(shape)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return likely


if __name__ == "__main__":
    sys.exit(main())
