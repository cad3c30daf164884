"""Tokens a second of the loop, from files that name model, data, reward, GPUs, batch, lengths and staleness alone.

Everything else is what Flotilla chooses; ledger, digests, canary, log-probabilities and timeline are on. By default a
step has 32 prompts of 100 tokens, each with 8 samples of 512 tokens, which a random model hardly ever ends earlier. The
reward is the share of the tokens whose character has an even number: about 0.5, never the same for two samples, and a
model can learn it. In the same fleet, first a run without a canary measures what a rollout and an update take alone
(`--no-alone` leaves it out): at staleness 0 the two take turns. Then one run for each `--staleness`. Prints one JSON
object a step with its phases and one a run with medians and means after the first two steps, and appends them to
`figures.jsonl`; timelines of the runs and the memory of each process on the GPUs lie beside it. No checkpoint and no
model are written after the last step. Ends with an error where a run fails, a sample is lost or trained twice, or the
two ends differ; a run that `--limit` cuts short says so.

`python bench/gpu/loop.py --gpus 2 --staleness 0 1 --steps 12 --out DIR`; `--shape 4b --prompts 64 --tokens 1024` for
another size; `--uneven` for lengths of a log-normal distribution up to `--tokens`, with the same ones in every step;
`--small` tries the bench itself on a CPU. To compare with another program, give it the same prompts, on
the same host.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
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
from forced_lengths import drawn, environment
from process_memory import watched
from random_model import SHAPES

from flotilla_coordinator.ledger.checker import check
from flotilla_core.config.document import Document
from flotilla_testing.stack import Stack, running_stack, wait_until

HERE = Path(__file__).resolve().parent
ROWS = 4096
"""Prompts of the data file: no run takes one twice."""
PROMPT_CHARACTERS = "0123456789+"
REWARD = '''"""Rewards that a random model has from the first sample on, and can learn."""


def score(response, **_):
    """Return the share of characters with an even number."""
    return sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))
'''
WARMING = 2
"""Steps that are left out: kernels are compiled and buffers are made in them."""
ALONE_STEPS = 4
MOST_APART = 1e-3
"""Mean probability difference of the two ends above which the figures mean nothing."""
RUN_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
LOOK_S = 0.5
ENDED = ("succeeded", "failed", "stopped")
CUT = "the limit of this bench"
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
    prompt_tokens: int = 100


def main() -> int:
    """Up, what each end takes alone, the runs, down."""
    asked = arguments()
    sizes = Work(asked.prompts, asked.samples, asked.tokens)
    if asked.small:
        asked.shape, sizes = "tiny", Work(4, 2, 16)
    asked.out.mkdir(parents=True, exist_ok=True)
    work: Path = asked.work or asked.out / "work"
    show_gpus(0 if asked.small else asked.gpus, asked.first_gpu)
    model = make_files(work, shape=asked.shape, model=asked.model)
    if asked.uneven:
        lengths = drawn(sizes.prompts * sizes.samples, sizes.tokens)
        os.environ.update(environment(work / "forced", lengths))
    description: dict[str, Any] = {"name": "loop", "model": str(model)}
    if asked.placement is not None:
        description["placement"] = asked.placement
    if asked.sleep:
        description |= {"placement": "colocated", "generator": {"sleep_while_training": True}}
    document = Document(description)
    for assignment in asked.set:
        document.override(assignment)
    bench = Bench(asked.out, work, sizes, asked.limit, asked.run)
    try:
        started = time.monotonic()
        with running_stack(document.values, work) as stack, watched(asked.out, stack):
            bench.say(up_s=round(time.monotonic() - started, 1), **as_started(stack))
            alone = bench.alone(stack) if asked.alone else {}
            for staleness in asked.staleness:
                bench.loop(stack, staleness, asked.steps, alone)
    finally:
        for log in (work / "state" / "loop" / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
    return 0


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--gpus", type=int, default=2)
    cli.add_argument("--first-gpu", type=int, default=0)
    cli.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    cli.add_argument("--steps", type=int, default=12)
    cli.add_argument("--placement", choices=("separate", "colocated"), help="in place of our choice")
    cli.add_argument("--sleep", action="store_true", help="colocated; KV caches are the trainer's in updates")
    cli.add_argument("--prompts", type=int, default=Work.prompts, help="prompts of a step")
    cli.add_argument("--samples", type=int, default=Work.samples, help="samples of a prompt")
    cli.add_argument("--tokens", type=int, default=Work.tokens, help="the most tokens of a sample")
    cli.add_argument("--uneven", action="store_true", help="lengths of a log-normal distribution, median 600")
    cli.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True)
    cli.add_argument("--limit", type=float, default=RUN_LIMIT_S, help="seconds after which a run is stopped")
    cli.add_argument("--set", metavar="KEY=VALUE", nargs="*", default=[], help="keys of the stack file")
    cli.add_argument("--run", metavar="KEY=VALUE", nargs="*", default=[], help="keys of the run files")
    cli.add_argument("--shape", choices=SHAPES, default="0.6b", help="the size of the random model")
    cli.add_argument(
        "--model", type=Path, help="a model to take instead, with a tokenizer that splits digits"
    )
    cli.add_argument(
        "--work", type=Path, help="the folder `work` of a run before: its model and compile cache"
    )
    cli.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    asked = cli.parse_args()
    if asked.steps <= WARMING:
        cli.error(f"--steps must be above {WARMING}")
    return asked


def show_gpus(count: int, first: int = 0) -> None:
    """Let the fleet have so many GPUs of the host, from the first one on."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + count)))


def make_files(
    work: Path,
    *,
    shape: str = "0.6b",
    model: Path | None = None,
    prompt_tokens: int = Work.prompt_tokens,
) -> Path:
    """Make data, reward and model in a folder that does not have them; return the model's folder.

    A shape has a name, or is the JSON of its own numbers; then the folder holds only one such model.
    """
    work.mkdir(parents=True, exist_ok=True)
    (work / "reward.py").write_text(REWARD)
    draw = random.Random(0)
    with (work / "prompts.jsonl").open("w") as file:
        for _ in range(ROWS):
            prompt = "".join(draw.choices(PROMPT_CHARACTERS, k=prompt_tokens))
            file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")
    if model is not None:
        return model.absolute()
    folder = (work / f"model-{shape if shape in SHAPES else 'drawn'}").absolute()
    if not folder.exists():
        subprocess.run([sys.executable, HERE / "random_model.py", shape, folder], check=True)
    return folder


def run_file(name: str, folder: Path, work: Work, steps: int, staleness: int) -> dict[str, Any]:
    """Return what a run file says, with the data and the reward of this folder."""
    return {
        "name": name,
        "steps": steps,
        "data": {"train": str(folder / "prompts.jsonl")},
        "rewards": [{"reward": f"{folder / 'reward.py'}:score"}],
        "checkpoint": {"every_steps": 0},
        "export_final": False,
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_staleness": staleness,
            "sampling": {"max_response_tokens": work.tokens},
        },
    }


def as_started(stack: Stack) -> dict[str, Any]:
    """Return what was chosen for the stack."""
    started = yaml.safe_load((stack.directory / "stack.yaml").read_text())
    trainer, generator = started["trainer"], started["generator"]
    return {
        "placement": started["placement"],
        "ranks": trainer["nproc"],
        "generators": generator["replicas"],
        "dtypes": [trainer["dtype"], generator["dtype"]],
        "kv_cache_gib": generator["kv_cache_gib"],
        "sleep_while_training": generator["sleep_while_training"],
        "apply_weights": generator["apply_weights"],
        "cpu_offload": trainer["cpu_offload"],
    }


class Bench:
    """Runs on one fleet and what they say."""

    def __init__(self, out: Path, folder: Path, work: Work, limit_s: float, keys: list[str]) -> None:
        """`keys` are KEY=VALUE of every run file."""
        self._out = out
        self._folder = folder.absolute()
        self._work = work
        self._limit_s = limit_s
        self._keys = keys

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
        """Make one run with everything on, and compare it with what each end takes alone."""
        found = self._run(stack, f"staleness-{staleness}", steps, staleness, {})
        if not found:
            return
        seconds = median(found, "time/step_s")
        mean_s = statistics.mean(step["time/step_s"] for step in found)
        # Two batches that were admitted together end together, so steps may be long and short in turns.
        facts: dict[str, Any] = {"steps": len(found), "step_s": seconds, "mean_step_s": round(mean_s, 4)}
        facts["tokens_per_s"] = median(found, "tokens_per_s")
        if alone:
            longer = max(alone.values())
            facts["over_the_longer_alone"] = round(seconds / longer, 3)
            facts["mean_over_the_longer_alone"] = round(mean_s / longer, 3)
        facts["medians"] = {name: median(found, name) for name in sorted(found[0]) if name.startswith(PHASES)}
        self.say(run=f"staleness-{staleness}", **facts)

    def _run(
        self, stack: Stack, name: str, steps: int, staleness: int, changes: dict[str, Any]
    ) -> list[dict[str, float]]:
        """Make a run; the figures of the steps that count."""
        file = self._folder / f"run-{name}.yaml"
        described = Document(run_file(name, self._folder, self._work, steps, staleness) | changes)
        for assignment in self._keys:
            described.override(assignment)
        file.write_text(yaml.safe_dump(described.values))
        self.say(run=name, plan=stack.flotilla("run", "plan", str(file)).out)
        finished = self._ended(stack, file)
        self._keep_timeline(stack, name, finished["run_id"])
        found = stack.metrics(finished)
        for step in found:
            shown = {key: value for key, value in step.items() if key.startswith(PHASES) or key in FIGURES}
            self.say(run=name, step=step["step"], **shown)
        verdict = check(stack.directory / "ledger.sqlite", finished["run_id"])
        apart = max((step.get("probs_diff/mean", 0.0) for step in found), default=0.0)
        self.say(run=name, state=finished["state"], reason=finished["reason"], ledger=str(verdict))
        assert finished["state"] == "succeeded" or finished["reason"] == CUT, finished["reason"]
        assert verdict.passed, verdict
        assert apart < MOST_APART, f"the ends differ by {apart}"
        return found[WARMING:]

    def _ended(self, stack: Stack, file: Path) -> dict[str, Any]:
        """Run to the end, or stop the run at the limit."""
        run: dict[str, Any] = stack.ok("run", "start", str(file))

        def over() -> bool:
            return stack.state(run) in ENDED

        try:
            wait_until("the end of the run", over, self._limit_s, LOOK_S)
        except AssertionError:
            stack.flotilla("run", "stop", run["run_id"])
            wait_until("the end of a run that was stopped", over, STOP_LIMIT_S, LOOK_S)
            return run | {"state": "stopped", "reason": CUT}
        with stack.client() as client:
            return run | {"state": stack.state(run), "reason": client.get_run(run["run_id"]).reason}

    def _keep_timeline(self, stack: Stack, name: str, run_id: str) -> None:
        trace = self._folder / f"timeline-{name}.json"
        stack.ok("timeline", run_id, "-o", str(trace))
        (self._out / f"timeline-{name}.json.gz").write_bytes(gzip.compress(trace.read_bytes()))


def median(steps: list[dict[str, float]], name: str) -> float:
    """Return the median of one figure, rounded."""
    return round(statistics.median(step.get(name, 0.0) for step in steps), 4)


if __name__ == "__main__":
    sys.exit(main())
