"""A stack of its own for one bench, gone at the end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FLOTILLA = str(Path(sys.executable).parent / "flotilla")
MODEL = ROOT / "examples" / "arithmetic" / "model"


class Fleet:
    """The command line of one running stack."""

    def __init__(self, stack_file: Path, state_dir: Path, name: str) -> None:
        self.stack_file = stack_file
        self.state_dir = state_dir / name

    def flotilla(self, *arguments: str) -> dict[str, Any]:
        """Run a command and return its JSON."""
        command = [FLOTILLA, *arguments, "--stack", str(self.stack_file), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return json.loads(done.stdout) if done.stdout.strip() else {}


@contextlib.contextmanager
def fleet(stack: dict[str, Any]) -> Iterator[Fleet]:
    """Bring a stack up in a temporary directory; take it down whatever happens."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as directory:
        state_dir = Path(directory)
        stack_file = state_dir / "stack.yaml"
        stack_file.write_text(yaml.safe_dump({"model": str(MODEL), "state_dir": str(state_dir), **stack}))
        running = Fleet(stack_file, state_dir, stack["name"])
        try:
            running.flotilla("up")
            yield running
        finally:
            running.flotilla("down")
