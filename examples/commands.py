"""What the demos share: they use the `flotilla` command as a user does, and tell each chapter of their story.

Invariants: a fleet that a demo started is always stopped again; one that was up before stays up.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLOTILLA = Path(sys.executable).with_name("flotilla")
CHAPTERS = 4


STANDARD_ERRORS = 3.0


class DemoFailed(Exception):
    """The demo did not show what it promises; the message says why."""


def flotilla(*arguments: str) -> dict[str, Any]:
    """Run the command line with its talk on our terminal; returns the object that it prints."""
    done = subprocess.run(
        [FLOTILLA, *arguments, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        command = " ".join(("flotilla", *arguments))
        raise DemoFailed(f"exit code {done.returncode}, for the reason said above, of: {command}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result.get("state") == "stopped":
        raise DemoFailed(f"run {result['run_id']} was stopped at step {result['step']}: {result['reason']}")
    return result


@contextmanager
def fleet(stack: tuple[str, ...]) -> Iterator[None]:
    """The fleet of an example: started if it does not run, and stopped again if it was started here."""
    try:
        ours = True
        ours = flotilla("up", *stack)["changed"]
        say("the fleet is up" if ours else "the fleet was up already")
        yield
    finally:
        if ours:
            flotilla("down", *stack)
            say("the fleet is down")


def train(stack: tuple[str, ...], files: list[Path], *overrides: str) -> dict[str, Any]:
    """Start a run and follow it to its end."""
    return flotilla("run", "start", *map(str, files), *overrides, *stack, "--wait")


def make(script: Path, *arguments: str) -> None:
    """Run a script of an example, with what it prints among our talk."""
    done = subprocess.run([sys.executable, str(script), *arguments], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise DemoFailed(f"exit code {done.returncode}, for the reason said above, of: {script}")


def arguments_of_recipe(description: str, stack: Path) -> argparse.Namespace:
    """Return what a user asks of a recipe whose held-out reward has to rise."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (%(default)s)")
    parser.add_argument("--stack", type=Path, default=stack, help="the fleet (%(default)s)")
    parser.add_argument("--rise", type=float, default=0.2, help="least rise of the reward (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    return parser.parse_args()


def learn_to_act(recipe: Path, seed: int, overrides: list[str]) -> Path:
    """Warm a small model up by imitation and train it with episodes; returns the directory of the second run."""
    stack = ("--stack", str(recipe / "stack.yaml"))
    chapter(1, "model and data")
    make(ROOT / recipe / "make.py")
    chapter(2, "fleet: generator, trainer, environment and coordinator on this machine")
    with fleet(stack):
        chapter(3, f"warm-up by imitation, then GRPO with episodes (seed {seed})")
        warm_up = train(stack, [recipe / "sft.yaml"], f"seed={seed}")
        start = f"initial_weights={warm_up['directory']}/model"
        run = train(stack, [recipe / "grpo.yaml"], f"seed={seed}", start, *overrides)
    chapter(4, "what came of it")
    return Path(run["directory"])


def require_rise(directory: Path, rise: float) -> None:
    """Raise unless the mean reward of held-out questions rose by so much, and by three standard errors."""
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    first, last = (line["eval/reward_mean"] for line in (lines[0], lines[-1]))
    error = math.hypot(*(line["eval/reward_stderr"] for line in (lines[0], lines[-1])))
    say(f"held-out reward: {first:.3f} to {last:.3f}, standard error of the difference {error:.3f}")
    say(f"curves, answers and the model: {directory}")
    if last - first < max(rise, STANDARD_ERRORS * error):
        raise DemoFailed(f"a rise of {rise} and of {STANDARD_ERRORS:g} standard errors was wanted")


def chapter(number: int, title: str) -> None:
    say(f"\n==> {number}/{CHAPTERS}  {title}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def told(story: Callable[[], None]) -> int:
    """Tell a story to its end; returns the exit code of the demo."""
    started = time.monotonic()
    try:
        story()
    except DemoFailed as failure:
        say(f"demo failed: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"\ndone in {time.monotonic() - started:.0f} s")
    return 0
