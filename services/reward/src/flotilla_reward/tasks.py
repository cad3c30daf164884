"""Scores answers to tasks of reasoning_gym, by the task's own `score_answer` and the entry that the row keeps.

Invariants: the package is imported in workers alone, in the jail, because scores of some tasks evaluate the answer as
Python. What it evaluates there is a formula or a literal, or it is refused. An entry is new for each answer: some
scores write into it. A row of another version of the package is never scored.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import sys
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from flotilla_core.generated_tasks import COLUMN, PACKAGE, TaskSource, data_set, package_version, unpacked
from flotilla_reward.builtin import BuiltinReward, CannotScore, Judged, Sample, Unreadable

EVALUATORS = ("reasoning_gym.", "sympy.parsing.sympy_parser")
"""Modules that evaluate answers."""
ANY_TEXT_SOLVES = frozenset({"game_of_life_halting"})
"""Tasks whose own score takes every text for right; here the answer has to be that of the entry."""
IN_FORMULAS = frozenset({"abs", "divmod", "max", "min", "pow", "round", "sum"})
"""Functions of Python that a formula may call."""
REFUSED = (
    *(ast.Attribute, ast.Lambda, ast.NamedExpr, ast.JoinedStr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class ReasoningGym(BuiltinReward):
    """A task of reasoning_gym, by the task's own score.

    1 when the answer between the last tags solves the task of the row; less, by the rules of the task, when it does so
    in part; else 0, also for a response that breaks the score or keeps it busy until the limit.
    """

    bounded: ClassVar[bool] = False
    jailed: ClassVar[bool] = True
    blames_response: ClassVar[bool] = True
    judges_by: ClassVar[tuple[str, ...]] = (PACKAGE,)

    tag: str = Field(
        default="answer",
        pattern=r"^([A-Za-z][A-Za-z0-9_-]*)?$",
        description="Name of the tags around the answer, without brackets; empty takes the whole response.",
    )

    def require(self) -> None:
        package_version()

    def prepare(self) -> None:
        importlib.import_module("reasoning_gym")
        importlib.import_module("sympy.parsing.sympy_parser")
        for name, module in [*sys.modules.items()]:
            if name.startswith(EVALUATORS):
                vars(module)["eval"] = evaluated

    def score(self, sample: Sample) -> float:
        row = sample.info.get(COLUMN)
        if not isinstance(row, dict):
            raise CannotScore(f"the row has no column {COLUMN}: its data are no {COLUMN}:TASK")
        if row["version"] != package_version():
            raise CannotScore(
                f"the row is of {PACKAGE} {row['version']}, and here is {package_version()}, whose scores may differ"
            )
        task, entry = _data_set(row["task"]), unpacked(row["entry"])
        answer = self.answer(sample.response)
        try:
            if TaskSource.parse(row["task"]).task in ANY_TEXT_SOLVES:
                value = float(answer == entry["answer"])
            else:
                value = float(task.score_answer(answer, entry))
        except Exception as error:  # whatever the text of a model makes of the scores of a hundred tasks
            raise Unreadable(f"{error!r:.200}") from error
        if not math.isfinite(value):
            raise Unreadable(f"the score of the task is {value}")
        return Judged(value, extracted=answer)

    def answer(self, response: str) -> str | None:
        """Return what stands between the last pair of tags; None where there is none."""
        if not self.tag:
            return response.strip()
        before, closed, _ = response.rpartition(f"</{self.tag}>")
        _, opened, answer = before.rpartition(f"<{self.tag}>")
        return answer.strip() if closed and opened else None


@lru_cache(maxsize=256)
def _data_set(task: str) -> Any:
    return data_set(TaskSource.parse(task))


def evaluated(code: str, *variables: Any) -> Any:
    """Evaluate a formula or a literal of an answer, and nothing that could reach beyond it."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        called = isinstance(node, ast.Call) and not isinstance(node.func, ast.Name)
        if called or isinstance(node, REFUSED) or (isinstance(node, ast.Name) and not _is_harmless(node.id)):
            raise ValueError("an answer is a formula or a literal")
    return eval(code.strip(), *variables)  # noqa: S307 - of what was just looked at


def _is_harmless(name: str) -> bool:
    return not name.startswith("_") and (name in IN_FORMULAS or not hasattr(builtins, name))
