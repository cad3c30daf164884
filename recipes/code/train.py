"""A language model learns to write Python functions, through the whole fleet, on two CPU cores.

Gets SmolLM2-135M-Instruct, makes the data, trains by the reward `code` alone, and shows the mean reward of greedy
answers to held-out questions before and after, and how long the programs took in their jails. Exits with 0 only when it
rises by at least `--rise` (0.2) and by three standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from flotilla_data.samples import read_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, DemoFailed, chapter, fleet, make, say, told, train

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)
STANDARD_ERRORS = 3.0


def story(asked: argparse.Namespace) -> None:
    """Tell all of it; raises `DemoFailed` where it ends otherwise."""
    stack = ("--stack", str(asked.stack))
    chapter(1, "model and data")
    make(ROOT / "examples" / "instruct" / "get_model.py")
    make(ROOT / RECIPE / "make_data.py")
    chapter(2, f"fleet: generator, trainer, rewards and coordinator on this machine ({asked.stack})")
    with fleet(stack):
        chapter(3, f"adapters learn from programs that pass their tests (seed {asked.seed})")
        run = train(stack, [RECIPE / "grpo.yaml"], f"seed={asked.seed}", *asked.overrides)
    chapter(4, "what came of it")
    directory = Path(run["directory"])
    tell_jails(directory)
    judge(directory, asked.rise)


def tell_jails(directory: Path) -> None:
    """Say how long programs were in their jails, with the starts of these, and beside the steps of the run."""
    steps = sum(
        json.loads(line)["time/step_s"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    )
    for kind, whose in (("step", "samples"), ("eval", "held-out answers")):
        took = [sum(each["seconds"] for each in one["verdicts"]) for one in read_samples(directory, kind)]
        beside = f", {sum(took) / steps:.1%} of the {steps:.0f} s of all steps" if kind == "step" else ""
        say(f"{len(took)} {whose}: {sum(took):.0f} s in jails, {sum(took) / len(took):.2f} s each{beside}")


def judge(directory: Path, rise: float) -> None:
    """Raise unless the mean reward of held-out questions rose."""
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    first, last = (line["eval/reward_mean"] for line in (lines[0], lines[-1]))
    error = math.hypot(*(line["eval/reward_stderr"] for line in (lines[0], lines[-1])))
    say(f"held-out reward: {first:.3f} to {last:.3f}, standard error of the difference {error:.3f}")
    say(f"curves, programs and the model: {directory}")
    if last - first < max(rise, STANDARD_ERRORS * error):
        raise DemoFailed(f"a rise of {rise} and of {STANDARD_ERRORS:g} standard errors was wanted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (%(default)s)")
    parser.add_argument("--stack", type=Path, default=RECIPE / "stack.yaml", help="the fleet (%(default)s)")
    parser.add_argument("--rise", type=float, default=0.2, help="least rise of the reward (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    asked = parser.parse_args()
    return told(lambda: story(asked))


if __name__ == "__main__":
    sys.exit(main())
