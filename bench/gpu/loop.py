"""Tokens a second of the loop, from files that name model, data, reward, GPUs, batch, lengths and staleness alone.

Everything else is what Flotilla chooses; ledger, digests, canary, log-probabilities and timeline are on. A step has 32
prompts x 8 samples of 512 tokens, which a random model hardly ever ends earlier. In the same fleet, first a run without
a canary measures what a rollout and an update take alone: at staleness 0 the two take turns. Then one run for each
`--staleness`. Prints one JSON object a step with its phases and one a run with medians after the first two steps, and
appends them to `figures.jsonl`; the timelines of the runs lie beside it. No checkpoint and no model are written after
the last step. Ends with an error where a run fails, a sample is lost or trained twice, or the two ends differ.

`python bench/gpu/loop.py --gpus 2 --staleness 0 1 --steps 12 --out DIR`; `--small` tries the bench itself on a CPU.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from figures import say
from smoke import ROOT, make_random_model

from flotilla_coordinator.ledger.checker import check
from flotilla_core.config.document import Document
from flotilla_testing.stack import Stack, running_stack

VERL = {1: 10_127, 2: 15_542}
"""Tokens a second of verl 0.9.1 on the same work, by H200."""
WARMING = 2
"""Steps that are left out: kernels are compiled and buffers are made in them."""
ALONE_STEPS = 4
MOST_APART = 1e-3
"""Mean probability difference of the two ends above which the figures mean nothing."""
RUN_LIMIT_S = 300.0
PHASES = ("time/", "sync/")
FIGURES = (
    "canary/mean",
    "probs_diff/mean",
    "probs_diff/max",
    "tokens_per_s",
    "staleness/mean",
    "staleness/max",
)


@dataclass(frozen=True)
class Work:
    """The batch and the lengths that the run files name."""

    prompts: int = 32
    samples: int = 8
    tokens: int = 512


def main() -> int:
    """Up, what each end takes alone, the runs, down."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--gpus", type=int, choices=VERL, default=2)
    cli.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    cli.add_argument("--steps", type=int, default=12)
    cli.add_argument("--placement", choices=("separate", "colocated"), help="in place of our choice")
    cli.add_argument("--sleep", action="store_true", help="colocated; KV caches are the trainer's in updates")
    cli.add_argument("--prompts", type=int, default=Work.prompts, help="prompts of a step")
    cli.add_argument("--set", metavar="KEY=VALUE", nargs="*", default=[], help="keys of the stack file")
    cli.add_argument("--model", type=Path, help="a model to take instead of the random one of 0.6B")
    cli.add_argument(
        "--work", type=Path, help="the folder `work` of a run before: its model and compile cache"
    )
    cli.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    asked = cli.parse_args()
    if asked.steps <= WARMING:
        cli.error(f"--steps must be above {WARMING}")
    if asked.sleep and any(asked.staleness):
        cli.error("--sleep needs --staleness 0")
    asked.out.mkdir(parents=True, exist_ok=True)
    work: Path = asked.work or asked.out / "work"
    show_gpus(0 if asked.small else asked.gpus)
    model = make_files(work, small=asked.small, model=asked.model)
    description: dict[str, Any] = {"name": "loop", "model": str(model)}
    if asked.placement is not None:
        description["placement"] = asked.placement
    if asked.sleep:
        description |= {"placement": "colocated", "generator": {"sleep_while_training": True}}
    document = Document(description)
    for assignment in asked.set:
        document.override(assignment)
    bench = Bench(asked.out, work, Work(4, 2, 16) if asked.small else Work(asked.prompts), asked.gpus)
    try:
        started = time.monotonic()
        with running_stack(document.values, work) as stack:
            bench.say(up_s=round(time.monotonic() - started, 1), **_as_started(stack))
            alone = bench.alone(stack)
            for staleness in asked.staleness:
                bench.loop(stack, staleness, asked.steps, alone)
    finally:
        for log in (work / "state" / "loop" / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
    return 0


def show_gpus(count: int) -> None:
    """Let the fleet have so many GPUs of the host, the first ones."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))


def make_files(work: Path, *, small: bool = False, model: Path | None = None) -> Path:
    """Make data and model in a folder that does not have them; return the model's folder."""
    work.mkdir(parents=True, exist_ok=True)
    for script, name in (("make_model.py", "tokenizer"), ("make_data.py", "data")):
        if not (work / name).exists():
            command = [sys.executable, ROOT / "examples/arithmetic" / script, "--out", work / name]
            subprocess.run(command, check=True)
    if model is not None:
        return model.absolute()
    if small:
        return work / "tokenizer"
    if not (work / "model").exists():
        make_random_model(work / "model", work / "tokenizer")
    return work / "model"


def run_file(name: str, data: Path, work: Work, steps: int, staleness: int) -> dict[str, Any]:
    """Return what a run file says."""
    return {
        "name": name,
        "steps": steps,
        "data": {"train": str(data)},
        "rewards": [{"reward": "exact"}],
        "checkpoint": {"every_steps": 0},
        "export_final": False,
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_staleness": staleness,
            "sampling": {"max_response_tokens": work.tokens},
        },
    }


def _as_started(stack: Stack) -> dict[str, Any]:
    """Return what was chosen for the stack."""
    started = yaml.safe_load((stack.directory / "stack.yaml").read_text())
    trainer, generator = started["trainer"], started["generator"]
    return {
        "placement": started["placement"],
        "ranks": trainer["nproc"],
        "generators": generator["replicas"],
        "dtypes": [trainer["dtype"], generator["dtype"]],
        "kv_cache_gib": generator["kv_cache_gib"],
    }


class Bench:
    """Runs on one fleet and what they say."""

    def __init__(self, out: Path, folder: Path, work: Work, gpus: int) -> None:
        self._out = out
        self._folder = folder
        self._work = work
        self._gpus = gpus

    def say(self, **facts: Any) -> None:
        """Print one JSON object and keep it."""
        say(self._out, **facts)

    def alone(self, stack: Stack) -> dict[str, float]:
        """Return the seconds of a rollout while nothing trains, and of an update while nothing decodes."""
        found = self._run(stack, "alone", WARMING + ALONE_STEPS, 0, {"weights": {"canary": {"prompts": 0}}})
        alone = {"generate_s": median(found, "time/rollout_s"), "train_s": median(found, "time/train_s")}
        self.say(run="alone", **alone)
        return alone

    def loop(self, stack: Stack, staleness: int, steps: int, alone: dict[str, float]) -> None:
        """Make one run with everything on, and compare it with what each end takes alone and with verl."""
        found = self._run(stack, f"staleness-{staleness}", steps, staleness, {})
        seconds = median(found, "time/step_s")
        speed = median(found, "tokens_per_s")
        mean_s = statistics.mean(step["time/step_s"] for step in found)
        self.say(
            run=f"staleness-{staleness}",
            steps=len(found),
            step_s=seconds,
            tokens_per_s=speed,
            over_verl=round(speed / VERL[self._gpus], 3),
            over_the_longer_alone=round(seconds / max(alone.values()), 3),
            # Two batches that were admitted together end together, so steps may be long and short in turns.
            mean_step_s=round(mean_s, 4),
            mean_over_the_longer_alone=round(mean_s / max(alone.values()), 3),
            medians={name: median(found, name) for name in sorted(found[0]) if name.startswith(PHASES)},
        )

    def _run(
        self, stack: Stack, name: str, steps: int, staleness: int, changes: dict[str, Any]
    ) -> list[dict[str, float]]:
        """Make a run; the figures of the steps that count."""
        file = self._folder / f"run-{name}.yaml"
        data = self._folder / "data" / "rl.jsonl"
        file.write_text(yaml.safe_dump(run_file(name, data, self._work, steps, staleness) | changes))
        finished = stack.run(file, timeout_s=RUN_LIMIT_S)
        self._keep_timeline(stack, name, finished["run_id"])
        found = stack.metrics(finished)
        for step in found:
            shown = {key: value for key, value in step.items() if key.startswith(PHASES) or key in FIGURES}
            self.say(run=name, step=step["step"], **shown)
        verdict = check(stack.directory / "ledger.sqlite", finished["run_id"])
        apart = max(step.get("probs_diff/mean", 0.0) for step in found)
        self.say(run=name, state=finished["state"], reason=finished["reason"], ledger=str(verdict))
        assert finished["state"] == "succeeded", finished["reason"]
        assert verdict.passed, verdict
        assert apart < MOST_APART, f"the ends differ by {apart}"
        return found[WARMING:]

    def _keep_timeline(self, stack: Stack, name: str, run_id: str) -> None:
        trace = self._folder / f"timeline-{name}.json"
        stack.ok("timeline", run_id, "-o", str(trace))
        (self._out / f"timeline-{name}.json.gz").write_bytes(gzip.compress(trace.read_bytes()))


def median(steps: list[dict[str, float]], name: str) -> float:
    """Return the median of one figure, rounded."""
    return round(statistics.median(step.get(name, 0.0) for step in steps), 4)


if __name__ == "__main__":
    sys.exit(main())
