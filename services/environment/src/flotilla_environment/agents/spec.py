"""Reads what a run says of its agent: the parameters of the environment `agent`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig
from flotilla_environment.builtin.answers import ends_with_number, holds

MOST_PROCESSES = 1024
CORRECT = {"none": None, "last_number": ends_with_number, "contains": holds}
RUNNER = "flotilla_environment.agents.function"
DESCRIPTION = "An agent of yours plays: a program, or a function, that uses a client of OpenAI or Anthropic."


@dataclass(frozen=True)
class Command:
    """A program that is run as an agent."""

    arguments: tuple[str, ...]
    folder: Path
    trusted: bool


@dataclass(frozen=True)
class AgentSpec:
    """The agent of a run."""

    command: str = ""
    """The program with its arguments, as in a shell. With `function` empty too, agents come by themselves."""
    function: str = ""
    """`path.py:name`: a function that is called with the task, instead of a command."""
    folder: str = "."
    """The folder in which it runs, on the host of the service."""
    processes: int = 0
    """Processes of a run in one replica that take one task after the other; 0: a process for each episode."""
    correct: str = "none"
    """The way in which the last turn is compared with the answer of the data, for a reward `correct`."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> AgentSpec:
        """Read the parameters of a run; raise InvalidConfig for what they cannot be."""
        known = {field.name: field for field in fields(cls)}
        for name, value in parameters.items():
            if name not in known:
                raise _wrong(name, f"there is no such parameter; there are {', '.join(known)}")
            kind = type(known[name].default)
            whole = kind is int and isinstance(value, float) and value.is_integer()  # as the wire has numbers
            if not whole and type(value) is not kind:
                raise _wrong(name, f"{value!r} is no {'whole number' if kind is int else 'text'}")
        given = dict(parameters)
        if "processes" in given:
            given["processes"] = int(given["processes"])
        return cls(**given)._checked()

    def _checked(self) -> AgentSpec:
        if self.correct not in CORRECT:
            raise _wrong("correct", f"{self.correct!r} is none of {', '.join(CORRECT)}")
        if not 0 <= self.processes <= MOST_PROCESSES:
            raise _wrong("processes", f"it is at least 0 and at most {MOST_PROCESSES}")
        if self.command and self.function:
            raise _wrong("function", "an agent has a command or a function")
        if self.processes and self.comes_by_itself:
            raise _wrong("processes", "there is no command or function to run in them")
        file, colon, name = self.function.rpartition(":")
        if self.function and not (colon and file.endswith(".py") and name.isidentifier()):
            raise _wrong("function", f"{self.function!r} is no path.py:name")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise _wrong("command", str(error)) from None
        return self

    @property
    def comes_by_itself(self) -> bool:
        """Whether the agent is a program that this service does not start."""
        return not self.command and not self.function

    def started(self, trusted: bool) -> Command:
        """Return what is run; raise InvalidConfig where its files are not on this host."""
        folder = Path(self.folder).absolute()
        if not os.path.isdir(folder):  # also where this process may not look
            raise _wrong("folder", f"{folder} is no folder on the host of the environment service")
        if not self.function:
            return Command(tuple(shlex.split(self.command)), folder, trusted)
        file, _, name = self.function.rpartition(":")
        if not (folder / file).is_file():
            raise _wrong("function", f"there is no file {folder / file}")
        runner = (sys.executable, "-P", "-m", RUNNER, str(folder / file), name)
        return Command(runner, folder, trusted)


def _wrong(name: str, why: str) -> InvalidConfig:
    return InvalidConfig(
        "the agent of the run is not usable", where=f"environment.parameters.{name}", why=why
    )
