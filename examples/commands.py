"""What the demos share: they use the `flotilla` command as a user does, and tell each chapter of their story.

Invariants: a fleet that a demo started is always stopped again; one that was up before stays up.
"""

from __future__ import annotations

import json
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
