"""The environments that come with the service, by their names, and the shortest of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flotilla_environment.builtin.answers import is_right
from flotilla_environment.builtin.calculator import Calculator
from flotilla_environment.builtin.frozen_lake import FrozenLake
from flotilla_environment.builtin.gymnasium import Gymnasium
from flotilla_environment.builtin.harbor import Harbor
from flotilla_environment.builtin.mcp import Mcp
from flotilla_environment.builtin.openenv import OpenEnv
from flotilla_environment.builtin.search import Search
from flotilla_environment.builtin.textarena import TextArena
from flotilla_environment.environment import Begun, Environment, Reply, Task, Turn
from flotilla_environment.tools import ToolEnvironment, python_tool


class Dialogue(Environment):
    """Asks the questions of the column `questions`, with the right answers in `answers`, after the prompt.

    Reward `correct` is the share of questions whose answer holds the right one.
    """

    def __init__(self, *, ignore_case: bool = True) -> None:
        self._ignore_case = ignore_case
        self._questions: list[str] = []
        self._answers: list[str] = []
        self._right: list[bool] = []

    def begin(self, task: Task) -> Begun:
        self._questions = [str(question) for question in task.info.get("questions", [])]
        self._answers = [str(answer) for answer in task.info.get("answers", [])]
        if not self._questions or len(self._questions) != len(self._answers):
            raise ValueError(
                f"the line has {len(self._questions)} questions and {len(self._answers)} answers, expected as many"
            )
        return Begun([*task.messages, {"role": "user", "content": self._questions[0]}])

    def reply(self, turn: Turn) -> Reply:
        said, right = turn.content, self._answers[len(self._right)]
        if self._ignore_case:
            said, right = said.casefold(), right.casefold()
        self._right.append(right in said)
        if len(self._right) == len(self._questions):
            return self._ended()
        return Reply(self._questions[len(self._right)])

    def stop(self, ending: str) -> Reply:
        return self._ended()

    def _ended(self) -> Reply:
        return Reply(done=True, rewards={"correct": sum(self._right) / len(self._questions)})


class Python(ToolEnvironment):
    """Python to answer the prompt with: reward `correct` where the answer is that of the data.

    A number is right where the last one of the answer is it, and another text where the answer holds it.
    """

    def __init__(self, *, limit_s: float = 5.0) -> None:
        """`limit_s` is the time of one program."""
        super().__init__()
        self._python = python_tool(limit_s=limit_s)

    def tools(self) -> list[Callable[..., Any]]:
        return [self._python]

    def score(self, answer: str) -> dict[str, float]:
        return {"correct": float(is_right(answer, self.task.answer))}


BUILTIN: dict[str, type[Environment]] = {
    "calculator": Calculator,
    "dialogue": Dialogue,
    "frozen_lake": FrozenLake,
    "gymnasium": Gymnasium,
    "harbor": Harbor,
    "mcp": Mcp,
    "openenv": OpenEnv,
    "python": Python,
    "search": Search,
    "textarena": TextArena,
}

JAILED = ("gymnasium", "python", "textarena")
"""The names of those that run packages of others, or what the policy wrote; the others are code of ours alone."""
