"""A chat model learns a task of reasoning_gym, through the whole fleet, on two CPU cores.

Gets SmolLM2-135M-Instruct, trains by rewards alone, and shows the mean reward of greedy answers to 200 held-out
questions before and after. Exits with 0 only when it rises by at least `--rise` (0.2) and by three standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, DemoFailed, chapter, fleet, make, say, told, train

from flotilla_core.generated_tasks import package_version

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)
STANDARD_ERRORS = 3.0


def story(asked: argparse.Namespace) -> None:
    """Tell all of it; raises `DemoFailed` where it ends otherwise."""
    stack = ("--stack", str(asked.stack))
    chapter(1, f"model, and tasks of reasoning_gym {package_version()}")
    make(ROOT / "examples" / "instruct" / "get_model.py")
    chapter(2, f"fleet: generator, trainer, rewards and coordinator on this machine ({asked.stack})")
    with fleet(stack):
        chapter(3, f"all weights learn from rewards alone (seed {asked.seed})")
        run = train(stack, [RECIPE / "grpo.yaml"], f"seed={asked.seed}", *asked.overrides)
    chapter(4, "what came of it")
    judge(Path(run["directory"]), asked.rise)


def judge(directory: Path, rise: float) -> None:
    """Raise unless the mean reward of held-out questions rose."""
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    first, last = (line["eval/reward_mean"] for line in (lines[0], lines[-1]))
    error = math.hypot(*(line["eval/reward_stderr"] for line in (lines[0], lines[-1])))
    say(f"held-out reward: {first:.3f} to {last:.3f}, standard error of the difference {error:.3f}")
    say(f"curves, answers and the model: {directory}")
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
