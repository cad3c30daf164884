"""An environment with Python, whose programs run in jails of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flotilla_environment.builtin.answers import ends_with_number, holds, number
from flotilla_environment.tools import ToolEnvironment, python_tool


class Python(ToolEnvironment):
    """Python to answer the prompt with: reward `correct` where the answer is that of the data.

    That is a number where the last one of the answer is it, and another text where the answer holds it.
    """

    def __init__(self, *, limit_s: float = 5.0) -> None:
        """`limit_s` is the time of one program."""
        super().__init__()
        self._python = python_tool(limit_s=limit_s)

    def tools(self) -> list[Callable[..., Any]]:
        return [self._python]

    def score(self, answer: str) -> dict[str, float]:
        right = self.task.answer
        is_right = holds if number(right) is None else ends_with_number
        return {"correct": float(is_right(answer, right))}
