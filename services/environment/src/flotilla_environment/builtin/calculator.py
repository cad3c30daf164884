"""An environment with a calculator.

Invariant: an expression is bounded in length and in the size of every number on its way, so none keeps the worker busy.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from flotilla_environment.builtin.answers import ends_with_number
from flotilla_environment.tools import ToolEnvironment

LONGEST = 200
LARGEST = 1e30
MOST_EXPONENT = 100

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Calculate an expression of numbers with + - * / // % ** and brackets, such as (12 + 7) * 3."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression} is no expression") from None
    except ArithmeticError as error:
        raise ValueError(str(error)) from None
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    value: float
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and type(node.value) is not bool
    ):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > MOST_EXPONENT or (left < 0 and right % 1)):
            raise ValueError(f"an exponent is at most {MOST_EXPONENT}, and whole of a negative number")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and brackets are calculated")
    if not abs(value) <= LARGEST:
        raise ValueError(f"numbers are at most {LARGEST:g}")
    return value


class Calculator(ToolEnvironment):
    """A calculator to answer the prompt with: reward `correct` where the last number of the answer is the right one."""

    def tools(self) -> list[Callable[..., Any]]:
        return [calculate]

    def score(self, answer: str) -> dict[str, float]:
        return {"correct": float(ends_with_number(answer, self.task.answer))}
