"""A language model learns to write Python functions, through the whole fleet, on two CPU cores.

Gets SmolLM2-135M-Instruct, makes the data, trains by the reward `code` alone, and shows the mean reward of greedy
answers to held-out questions before and after, and how long the programs took in their jails. Exits with 0 only when it
rises by at least `--rise` (0.2) and by three standard errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flotilla_data.samples import read_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, arguments_of_recipe, chapter, fleet, make, require_rise, say, told, train

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)


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
    require_rise(directory, asked.rise)


def tell_jails(directory: Path) -> None:
    """Say how long programs were in their jails, with the starts of these, and beside the steps of the run."""
    steps = sum(
        json.loads(line)["time/step_s"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    )
    for kind, whose in (("step", "samples"), ("eval", "held-out answers")):
        took = [sum(each["seconds"] for each in one["verdicts"]) for one in read_samples(directory, kind)]
        beside = f", {sum(took) / steps:.1%} of the {steps:.0f} s of all steps" if kind == "step" else ""
        say(f"{len(took)} {whose}: {sum(took):.0f} s in jails, {sum(took) / len(took):.2f} s each{beside}")


def main() -> int:
    asked = arguments_of_recipe(__doc__.splitlines()[0], RECIPE / "stack.yaml")
    return told(lambda: story(asked))


if __name__ == "__main__":
    sys.exit(main())
