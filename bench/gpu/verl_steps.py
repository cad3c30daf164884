"""Steps of verl 0.9.1 on the work of `loop.py`: GRPO, FSDP2, vLLM's asynchronous server, the synchronous trainer.

`python bench/gpu/verl_steps.py --model DIR --gpus 2 --out DIR`, in an environment that has verl, Ray and vLLM. It
gets the settings that made verl fastest here: no old log-probabilities (`bypass_mode`), finished rollouts looked for
every 0.1 s instead of every 2 s, and flash attention's cross entropy, without which verl loops over tokens in Python.
Both ends of it share the GPUs, and vLLM's memory is the trainer's during updates, as verl does by default. Prints each
step with its phases and the medians after the first one; verl's whole log lies in `--out`. `--set` gives verl other
settings; `--print` shows all of them and runs nothing.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forced_lengths

PROMPT_TOKENS = 100
PROMPT_CHARACTERS = "0123456789+"
ROWS = 4096
END_OF_MESSAGE = "<|im_end|>"
"""A token that verl looks up for every Qwen3."""
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")
REWARD = '''"""The share of characters with an even number."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(1, len(solution_str))
'''
CROSS_ENTROPY = '''"""The kernel that verl takes from flash attention where that is installed."""
import verl.utils.torch_functional as functional

if not functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
    from flash_ce_kernel import cross_entropy_loss

    functional.cross_entropy_loss = cross_entropy_loss
    functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
'''
POLL = re.compile(r"poll_interval: float = [0-9.]+")
STEP = re.compile(r"\bstep:(\d+) - (.*)")
FIGURE = re.compile(r"([\w/\-.]+):(?:np\.float\d+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?")
TOLD = re.compile(
    r"Started a local Ray|model engine init|Available KV cache memory|Graph capturing finished|init engine"
    r"|all initialize finished|Traceback|\w*Error\b|OutOfMemory|No space left"
)
MOST_TOLD = 3
"""Lines of one kind that are shown."""


def main() -> int:
    """Prepare, run, print."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", type=Path, required=True, help="a folder that random_model.py wrote")
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--work", type=Path, default=Path("/tmp/verl-bench"))
    cli.add_argument("--gpus", type=int, default=2)
    cli.add_argument("--prompts", type=int, default=32)
    cli.add_argument("--samples", type=int, default=8)
    cli.add_argument("--tokens", type=int, default=512)
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--uneven", action="store_true", help="lengths as those of loop.py --uneven")
    cli.add_argument("--microbatch", type=int, default=32, help="samples of a micro-batch of a GPU")
    cli.add_argument("--memory", type=float, default=0.5, help="vLLM's share of a GPU")
    cli.add_argument("--limit", type=float, default=345.0, help="seconds after which verl is ended")
    cli.add_argument("--set", metavar="KEY=VALUE", nargs="*", default=[], help="settings of verl's")
    cli.add_argument("--print", action="store_true")
    asked = cli.parse_args()
    if asked.print:
        print("\n".join(settings(asked)))
        return 0
    shutil.rmtree(asked.work, ignore_errors=True)
    asked.work.mkdir(parents=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    prepare(asked.model, asked.work)
    if asked.uneven:
        os.environ.update(forced_lengths.environment(asked.work / "forced", lengths(asked)))
    return Verl(asked).run()


def lengths(asked: argparse.Namespace) -> list[int]:
    """Return how long the samples of a step are."""
    count = asked.prompts * asked.samples
    return forced_lengths.drawn(count, asked.tokens) if asked.uneven else [asked.tokens] * count


def settings(asked: argparse.Namespace) -> list[str]:
    """Return what verl is told."""
    work, actor = asked.work.absolute(), "actor_rollout_ref.actor"
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    told = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": work / "train.parquet",
        "data.val_files": work / "val.parquet",
        "data.train_batch_size": asked.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": asked.tokens,
        "data.filter_overlong_prompts": False,
        "data.dataloader_num_workers": 0,
        f"{model}.path": work / "model",
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": True,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{model}.use_fused_kernels": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.ppo_mini_batch_size": asked.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": asked.microbatch,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": "async",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n": asked.samples,
        f"{rollout}.gpu_memory_utilization": asked.memory,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.max_model_len": max(1024, PROMPT_TOKENS + asked.tokens),
        f"{rollout}.enforce_eager": False,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": asked.microbatch,
        f"{rollout}.agent.num_workers": 8,
        "reward.custom_reward_function.path": work / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 4,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 4,
        "trainer.use_v1": True,
        "trainer.n_gpus_per_node": asked.gpus,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": asked.steps,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": work / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 24,
        "+ray_kwargs.ray_init.num_gpus": asked.gpus,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 4_000_000_000,
        "+ray_kwargs.ray_init._temp_dir": "/tmp/ray-of-verl",
        "hydra.run.dir": work / "hydra",
    }
    told |= dict(assignment.split("=", 1) for assignment in asked.set)
    return [f"{key}={value}" for key, value in told.items()]


def prepare(model: Path, work: Path) -> None:
    """Write the reward, the data, and a model folder with what verl looks up."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    (work / "reward.py").write_text(REWARD)
    (work / "verl_cross_entropy.py").write_text(CROSS_ENTROPY)
    own = work / "model"
    own.mkdir()
    for file in model.absolute().iterdir():
        (shutil.copy if file.suffix == ".json" else os.symlink)(file, own / file.name)
    name_end_of_message(own / "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(own)
    draw = random.Random(0)
    rows: list[dict[str, Any]] = [
        {
            "data_source": "characters",
            "prompt": [
                {"role": "user", "content": "".join(draw.choices(PROMPT_CHARACTERS, k=PROMPT_TOKENS))}
            ],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(ROWS)
    ]
    for name, count in (("train", ROWS), ("val", 32)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:count]), work / f"{name}.parquet")
    text = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert len(tokenizer(text)["input_ids"]) == PROMPT_TOKENS


def name_end_of_message(file: Path) -> None:
    """Give the last token the name that verl looks up: the model has no row for one more token."""
    described = json.loads(file.read_text())
    ids: dict[str, int] = described["model"]["vocab"]
    last = max(ids, key=ids.__getitem__)
    ids[END_OF_MESSAGE] = ids.pop(last)
    kind = described["added_tokens"][-1] | {"id": ids[END_OF_MESSAGE], "content": END_OF_MESSAGE}
    described["added_tokens"].append(kind)
    file.write_text(json.dumps(described))


def environment(work: Path) -> dict[str, str]:
    """Return what verl runs in: its rollouts are looked for ten times a second, and its kernel is there."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl is not installed"
    buffer = Path(spec.origin).parent / "trainer/ppo/v1/replay_buffer.py"
    buffer.write_text(POLL.sub("poll_interval: float = 0.1", buffer.read_text()))
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    return kept | {
        "PYTHONPATH": f"{work.absolute()}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_COLOR_PREFIX": "0",
        "VERL_USE_EXTERNAL_MODULES": "verl_cross_entropy",
    }


@dataclass
class Verl:
    """One run of verl, and what it says."""

    asked: argparse.Namespace
    steps: list[dict[str, float]] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)

    def run(self) -> int:
        """Run verl to its end or to the limit; print steps and medians."""
        started = time.monotonic()
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(self.asked)]
        with (
            gzip.open(self.asked.out / "verl.log.gz", "wt") as log,
            subprocess.Popen(
                command,
                cwd=self.asked.work,
                env=environment(self.asked.work),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as process,
        ):
            limit = threading.Timer(self.asked.limit, os.killpg, (process.pid, signal.SIGKILL))
            limit.start()
            assert process.stdout is not None
            for line in process.stdout:
                after = time.monotonic() - started
                log.write(f"{after:8.2f} {line}")
                self._read(line, after)
            limit.cancel()
        self._say(verl="0.9.1", code=process.returncode, seconds=round(time.monotonic() - started))
        self._summary()
        return 0 if len(self.steps) == self.asked.steps else 1

    def _read(self, line: str, after: float) -> None:
        if found := STEP.search(line):
            figures = {name: float(value) for name, value in FIGURE.findall(found[2])}
            step = {name: figures[f"timing_s/{name}"] for name in PHASES if f"timing_s/{name}" in figures}
            step |= {"step_s": figures.get("timing_s/step", float("nan")), "ended_at_s": round(after, 2)}
            self.steps.append(step)
            seen = ("response_length/mean", "prompt_length/mean", "actor/grad_norm", "critic/rewards/mean")
            memory = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
            self._say(step=int(found[1]), **step, **{n: figures[n] for n in seen + memory if n in figures})
        elif (kind := TOLD.search(line)) and self.told.setdefault(kind[0], 0) < MOST_TOLD:
            self.told[kind[0]] += 1
            print(f"{after:7.1f} {line.strip()[:230]}", flush=True)

    def _summary(self) -> None:
        """Medians after the first step, which compiles and fills caches."""
        if len(self.steps) < 2:
            return
        rest = self.steps[1:]
        walls = [
            later["ended_at_s"] - sooner["ended_at_s"]
            for sooner, later in zip(self.steps, rest, strict=False)
        ]
        step_s = statistics.median(step["step_s"] for step in rest)
        tokens = sum(lengths(self.asked))
        self._say(
            verl="0.9.1",
            steps=len(rest),
            step_s=round(step_s, 3),
            step_by_the_clock_s=round(statistics.median(walls), 3),
            tokens_per_s=round(tokens / step_s),
            medians={n: round(statistics.median(s.get(n, 0.0) for s in rest), 3) for n in PHASES},
        )

    def _say(self, **facts: Any) -> None:
        line = json.dumps(facts)
        print(line, flush=True)
        with (self.asked.out / "verl.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
