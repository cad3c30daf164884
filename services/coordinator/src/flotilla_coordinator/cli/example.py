"""Makes the model and data of the arithmetic example, the first time that a stack of it is brought up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flotilla_coordinator.cli.output import say
from flotilla_coordinator.cli.stack_choice import EXAMPLE

LAST_LINES = 5


def make_example(file: Path | None) -> None:
    """Does nothing for any other stack, or when model and data are there."""
    if file is None or file.resolve().parent != EXAMPLE.resolve():
        return
    for folder, script, what in (
        ("model", "make_model.py", "model of the arithmetic example (0.8M parameters)"),
        ("data", "make_data.py", "data of the arithmetic example"),
    ):
        if not (EXAMPLE / folder).exists():
            say(f"making the {what}: {EXAMPLE / folder}")
            _make(EXAMPLE / script)


def _make(script: Path) -> None:
    from flotilla_core.errors import FailedPrecondition

    # Progress bars of its libraries would tear up our own output; a failure shows what it said last.
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-LAST_LINES:])
        raise FailedPrecondition(
            "the arithmetic example could not be made",
            where=str(script),
            why=f"the script exited with code {done.returncode}\n{last}\n",
            next_step=f"run it by hand: {sys.executable} {script}",
        )
