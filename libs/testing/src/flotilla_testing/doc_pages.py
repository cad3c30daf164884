"""Pages of documentation as a reader follows them: the files, the code and the commands of their blocks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_client import connect
from flotilla_testing.command_line import run_command

ROOT = Path(__file__).resolve().parents[4]
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.(?:yaml|py))\n")
"""The first line of a block that is a file."""
NEEDS_A_SHELL = re.compile(r"[|&;<>$`*?(){}~#\\\n]")
COMMAND_TIMEOUT_S = 300.0


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block."""
    for _, language, text in FENCED.findall(page.read_text("utf-8")):
        yield language, text


@dataclass
class Reader:
    """Does in a folder what pages say, with the commands of this environment and without the hub."""

    folder: Path
    instead: dict[str, str] = field(default_factory=dict)
    """The texts that the reader writes in place of the page's: paths and names that differ between readers."""
    prepared: Callable[[str], str | None] = str
    """Makes the command that is run from one of the page; None leaves it out."""
    said: dict[str, str] = field(default_factory=dict)
    """The output of each command of a page."""

    def follow(self, page: str) -> None:
        """Write the files of a page, and run its code and commands, from top to bottom."""
        for language, text in blocks(ROOT / page):
            if language in ("yaml", "python") and (named := FILE.match(text)):
                self.write(named[1], text)
            elif language == "python":
                self.run([sys.executable, "-c", self._own(text)])
            elif language == "json":
                json.loads(text)
            elif language == "":
                self.follow_commands(text)

    def follow_commands(self, text: str) -> None:
        """Run the commands of a block, each by itself."""
        for line in text.splitlines():
            command = line.partition("  #")[0].strip().removeprefix(".venv/bin/")
            prepared = self.prepared(self._own(command))
            if prepared is not None:
                self.said[command] = self.shell(prepared)

    def write(self, name: str, text: str) -> None:
        """Write a file of a page."""
        (self.folder / name).write_text(self._own(text), "utf-8")

    def shell(self, command: str, *, code: int = 0) -> str:
        """Run a command line that ends with this exit code; return its results."""
        if command.startswith("flotilla ") and not NEEDS_A_SHELL.search(command):
            arguments = shlex.split(command)[1:]
            ended, out, err = run_command(arguments, self._environment(), COMMAND_TIMEOUT_S, self.folder)
            assert ended == code, f"{command}: {ended}\n{out}\n{err}"
            return out
        return self.run(["bash", "-ec", command], code=code)

    def run(self, arguments: list[str], *, code: int = 0) -> str:
        done = subprocess.run(
            arguments,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, f"{arguments[-1]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def stop_after_a_step(self, stack: str) -> tuple[str, str]:
        """Stop the newest run after its first step; return its id, and that of the run before it."""
        with connect(stack, self.folder / ".flotilla") as fleet:
            newest, before, *_ = fleet.list_runs()
            next(event for event in fleet.watch_run(newest.run_id) if event.HasField("step"))
            fleet.stop_run(newest.run_id)
            fleet.wait_run(newest.run_id)
        return newest.run_id, before.run_id

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}

    def _own(self, text: str) -> str:
        for theirs, ours in self.instead.items():
            text = text.replace(theirs, ours)
        return text
