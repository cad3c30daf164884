"""The arithmetic example learns on a host with two GPUs: trainer on the first, generator on the second, NCCL.

One fleet and one warm-up for each algorithm, all of them side by side on the same two GPUs (`CUDA_VISIBLE_DEVICES`
names a GPU as often as it is shared). Judged as `make demo` judges. `python bench/gpu/learn.py --out DIR`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flotilla_testing.stack import Stack, running_stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
RUN_LIMIT_S = 1500.0
LOWEST_END = 0.90
FILES = {
    "ppo": ["ppo.yaml"],
    "lora": ["grpo.yaml", "longer.yaml", "lora.yaml"],
    "rloo": ["grpo.yaml", "steady.yaml", "once.yaml"],
    "remax": ["grpo.yaml", "steady.yaml", "once.yaml"],
}
"""Of `examples/arithmetic`, as the demo takes them."""
ALGORITHMS = ("grpo", "rloo", "remax", "gspo", "dapo", "ppo", "lora")


def main() -> int:
    """Every algorithm at once, one process each; 0 when all reached the bar."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    cli.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    cli.add_argument("--gpus", default="0,1", help="that of the trainers and that of the generators")
    cli.add_argument("--one", choices=ALGORITHMS, help="only this one, in this process")
    asked = cli.parse_args()
    if asked.one:
        return _learn(asked.one, asked.dtype, asked.out)
    asked.out.mkdir(parents=True, exist_ok=True)
    for script, name in (("make_model.py", "model"), ("make_data.py", "data")):
        subprocess.run([sys.executable, EXAMPLE / script, "--out", asked.out / "example" / name], check=True)
    trainers, generators = asked.gpus.split(",")
    children = []
    for name in asked.algorithms:
        gpus = ",".join([*([trainers] * (2 if name == "ppo" else 1)), generators])
        command = [sys.executable, __file__, "--out", asked.out, "--one", name, "--dtype", asked.dtype]
        children.append(subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus}))
    return max(child.wait() for child in children)


def _learn(name: str, dtype: str, out: Path) -> int:
    """Warm up, learn, print one JSON object."""
    work = out / name
    work.mkdir()
    with fleet(name, _description(name, dtype, out), out) as stack:
        started = time.monotonic()
        warm = _finished(stack, ["sft.yaml"], out)
        files = FILES.get(name, ["grpo.yaml", "steady.yaml"])
        algorithm = {"lora": "grpo"}.get(name, name)
        start = f"initial_weights={warm['directory']}/model"
        run = _finished(stack, files, out, start, f"algorithm.type={algorithm}")
        steps = stack.metrics(run)
    before, after = run["metrics"]["eval/accuracy_before"], run["metrics"]["eval/accuracy"]
    figures = {
        "algorithm": name,
        "before": before,
        "after": after,
        "seconds": round(time.monotonic() - started, 1),
        "step_s": sorted(step["time/step_s"] for step in steps)[len(steps) // 2],
        "probs_diff_mean": max(step.get("probs_diff/mean", 0.0) for step in steps),
        "canary_max": max(step["canary/max"] for step in steps),
    }
    print(json.dumps(figures), flush=True)
    return 0 if after >= LOWEST_END else 1


def _finished(stack: Stack, files: list[str], out: Path, *overrides: str) -> dict[str, Any]:
    data = out / "example" / "data"
    train = data / ("sft.jsonl" if files == ["sft.yaml"] else "rl.jsonl")
    where = [f"data.train={train}", f"evaluation.data={data / 'heldout.jsonl'}"]
    paths = [str(EXAMPLE / file) for file in files]
    done = stack.flotilla(
        "run", "start", *paths, *where, *overrides, "--wait", "--json", timeout_s=RUN_LIMIT_S
    )
    if done.code != 0:
        raise SystemExit(f"{stack.file.parent.name}: {done.err[-3000:]}")
    finished: dict[str, Any] = done.json
    return finished


def _description(name: str, dtype: str, out: Path) -> dict[str, Any]:
    """One rank of the trainer, one generator with a small share of its GPU."""
    description: dict[str, Any] = {
        "model": str(out / "example" / "model"),
        "generator": {"dtype": dtype, "memory_fraction": 0.08, "max_model_tokens": 64},
        "trainer": {"dtype": dtype, "nproc": 1},
        "reward": {"replicas": 1, "workers": 2},
    }
    if name == "ppo":
        description["critic"] = {"replicas": 1, "dtype": dtype, "nproc": 1}
    return description


@contextmanager
def fleet(name: str, description: dict[str, Any], out: Path) -> Iterator[Stack]:
    """Boots while no other one of `out` does, works in a folder of its own there; its logs stay."""
    try:
        with ExitStack() as booted:
            with _alone(out):
                stack = booted.enter_context(running_stack({"name": name, **description}, out / name))
            yield stack
    finally:
        for log in (out / name / "state" / name / "logs").glob("*.log"):
            shutil.copy(log, out / f"{name}-{log.name}")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """One fleet boots at a time: an engine measures the memory of its GPU then, and others' would count as its own."""
    with (out / "boot.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
