"""Run five steps or more at staleness 0 and 1, and with LoRA, on a host with GPUs: trainer and generator in bfloat16.

`ppo` among the runs starts a critic, on a third GPU if there is one; `--ranks`, `--replicate` and `--sequence-parallel`
arrange more ranks of the trainer. With `--one-gpu` or `--colocated` both share a GPU, and weights go by CUDA IPC.
`--eager` decodes without graphs, and `--boots 2` starts the fleet again with what the first start compiled.

Makes a Qwen3-0.6B-shaped model with random weights (accuracy means nothing here), brings the fleet up as a user would,
runs, checks that trainer and generator agree, and prints one JSON object a run. `python bench/gpu/smoke.py --out DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from flotilla_testing.stack import Stack, running_stack

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 1800.0
RUNS: dict[str, dict[str, Any]] = {
    "staleness-0": {},
    "staleness-1": {"rollout": {"max_staleness": 1}},
    "lora": {"lora": {"rank": 32, "alpha": 64}, "optimizer": {"learning_rate": 1.0e-3}},
    "ppo": {"algorithm": {"type": "ppo"}},
}
FIGURES = (
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "time/canary_s",
    "time/wait_for_the_canary_s",
    "sync/bytes",
    "sync/stage_s",
    "sync/stall_s",
    "canary/mean",
    "canary/max",
    "probs_diff/mean",
    "probs_diff/max",
    "critic/loss",
    "critic/explained_variance",
    "tokens_per_s",
    "staleness/max",
)


def make_random_model(folder: Path, tokenizer: Path) -> None:
    """Random weights in the shape of a Qwen3-0.6B, with the example's tokenizer."""
    sys.path.insert(0, str(ROOT / "bench"))
    from qwen3_shape import QWEN3_0_6B, make_model

    limits = {"max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0}
    make_model(folder, dtype="bfloat16", **QWEN3_0_6B | limits)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


def main() -> int:
    """Up, the runs, down."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--runs", nargs="+", choices=RUNS, default=[name for name in RUNS if name != "ppo"])
    cli.add_argument("--ranks", type=int, default=1)
    cli.add_argument("--replicate", type=int, default=1)
    cli.add_argument("--sequence-parallel", type=int, default=1)
    cli.add_argument("--one-gpu", action="store_true")
    cli.add_argument("--colocated", action="store_true", help="a generator on the GPU of each trainer rank")
    cli.add_argument("--eager", action="store_true")
    cli.add_argument("--boots", type=int, default=1)
    cli.add_argument("--steps", type=int, default=5)
    asked = cli.parse_args()
    out: Path = asked.out
    work = out / "work"
    work.mkdir(parents=True)
    for script, name in (("make_model.py", "tokenizer"), ("make_data.py", "data")):
        subprocess.run(
            [sys.executable, ROOT / "examples/arithmetic" / script, "--out", work / name], check=True
        )
    make_random_model(work / "model", work / "tokenizer")
    description: dict[str, Any] = {
        "name": "gpu",
        "model": str(work / "model"),
        "generator": {"dtype": "bfloat16", "memory_fraction": 0.5, "max_model_tokens": 1024},
        "trainer": {
            "dtype": "bfloat16",
            "nproc": asked.ranks,
            "replicate": asked.replicate,
            "sequence_parallel": asked.sequence_parallel,
        },
    }
    if asked.eager:
        description["generator"]["enforce_eager"] = True
    if asked.one_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
    if asked.colocated:
        description["placement"] = "colocated"
        del description["generator"]["memory_fraction"]
        description["generator"]["replicas"] = asked.ranks
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(asked.ranks)))
    if "ppo" in asked.runs:
        description["critic"] = {"replicas": 1, "dtype": "bfloat16", "nproc": 1}
    try:
        for boot in range(1, asked.boots + 1):
            started = time.monotonic()
            with running_stack(description, work) as stack:
                print(json.dumps({"boot": boot, "up_s": round(time.monotonic() - started, 1)}), flush=True)
                for name in asked.runs if boot == asked.boots else ():
                    _run(stack, work, name, asked.steps, RUNS[name])
    finally:
        for log in (work / "state" / "gpu" / "logs").glob("*.log"):
            shutil.copy(log, out / log.name)
    return 0


def _run(stack: Stack, work: Path, name: str, steps: int, changes: dict[str, Any]) -> None:
    run: dict[str, Any] = {
        "name": f"smoke-{name}",
        "steps": steps,
        "data": {"train": str(work / "data" / "rl.jsonl")},
        "rewards": [{"reward": "exact"}],
        "optimizer": {"schedule": "constant", **changes.get("optimizer", {"learning_rate": 1.0e-6})},
        "batching": {"tokens_per_microbatch": 16384},
        "weights": {"canary": {"prompts": 16, "tokens": 32}},
        "export_final": False,
        **{key: value for key, value in changes.items() if key not in ("optimizer", "rollout")},
        "rollout": {
            "prompts_per_step": 32,
            "samples_per_prompt": 8,
            "sampling": {"max_response_tokens": 512},
            **changes.get("rollout", {}),
        },
    }
    file = work / f"run-{name}.yaml"
    file.write_text(yaml.safe_dump(run))
    finished = stack.run(file, timeout_s=RUN_LIMIT_S)
    print(json.dumps({"run": name, "state": finished["state"], "reason": finished["reason"]}), flush=True)
    for step in stack.metrics(finished):
        figures = {figure: step.get(figure) for figure in FIGURES}
        print(json.dumps({"run": name, "step": step["step"], **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
