"""Writes what `flotilla init --environment` adds: sections of both files, and the file of an environment to begin with.

Invariant: an environment whose file is there is the user's work, and stays as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from flotilla_core.config.model import function_path
from flotilla_core.config.run import PATHS, spelled_out
from flotilla_core.errors import InvalidRequest

TURNS = 4
SAID_TOKENS = 64
"""Room for what an environment says at its beginning, and before each turn."""
CLASS_OF_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")

START = '''\
"""The environment of run.yaml: it asks, answers each turn of the policy, and gives the rewards."""

from flotilla_environment import Begun, Environment, Reply, Task, Turn


class NAME(Environment):
    """A start: the policy has some tries to find the answer of the row. Write here what you want instead."""

    def __init__(self, *, tries: int = TURNS) -> None:
        self.tries = tries

    def begin(self, task: Task) -> Begun:
        # `task.info` has the other columns of the row. Draw by `task.seed`: all samples of a prompt have the same.
        self.answer = task.answer
        return Begun(task.messages, state=str(self.tries))

    def reply(self, turn: Turn) -> Reply:
        self.tries -= 1
        if self.answer and self.answer in turn.content:
            return Reply(done=True, rewards={"correct": 1.0})
        if self.tries == 0:
            return Reply(done=True, rewards={"correct": 0.0})
        # `gigpo` compares turns that were asked in the same state; nothing else looks at it.
        return Reply("That is not right. Try again.", state=str(self.tries))

    def stop(self, ending: str) -> Reply:
        return Reply(done=True, rewards={"correct": 0.0})
'''


@dataclass(frozen=True)
class Episodes:
    """The environment of a run that is written."""

    name: str
    """As the run file names it."""
    file: Path | None = None
    """The file to write; None where it is there, or where the environment is no class of a file."""

    @classmethod
    def of(cls, option: str, folder: Path) -> Episodes:
        """Return what an option names, by a path that means the same in the folder of the files."""
        found = CLASS_OF_FILE.fullmatch(option)
        short, own = spelled_out(option)
        if own:
            if short in PATHS and folder.absolute() != Path.cwd():
                option = f"{short}:{Path(option.partition(':')[2]).expanduser().absolute()}"
            return cls(option)
        if found is None:
            if ".py" in option or "/" in option:
                raise InvalidRequest(
                    f"{option} names no class", where="--environment", next_step="write it as path.py:Class"
                )
            return cls(option)
        file = Path(found["file"]).expanduser()
        name = option if folder.absolute() == Path.cwd() else function_path(option, Path.cwd())
        return cls(name, None if file.exists() else file)

    @property
    def start(self) -> str:
        """The text of the file."""
        return START.replace("NAME", self.name.rpartition(":")[2]).replace("TURNS", str(TURNS))

    @staticmethod
    def tokens(prompt: int, response: int) -> int:
        """Return the room of an episode."""
        return prompt + SAID_TOKENS + TURNS * (response + SAID_TOKENS)

    def section(self, tokens: int) -> str:
        """Return the section of the run file."""
        return f"""\
environment:
  name: {json.dumps(self.name, ensure_ascii=False)}
  # Each turn has at most rollout.sampling.max_response_tokens.
  max_turns: {TURNS}
  # Prompt, turns, and what the environment says between them.
  episode_tokens: {tokens}
"""

    @staticmethod
    def stack_sections() -> str:
        """Return the sections of the stack file."""
        return """
environment:
  replicas: 1

# The environment gives the rewards. Terms under `rewards` of the run need a replica here.
reward:
  replicas: 0
"""
