"""The rewards in a worker: how one is loaded, and how what it returns becomes a score.

Workers that run a function of the user's import nothing heavy of ours.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from flotilla_workers.functions import Refusal, Target, user_function

WRAP_ASYNC = """import asyncio

def reward(prompt, response, answer, info):
    return asyncio.run({function}(prompt=prompt, response=response, answer=answer, info=info))"""
WRAP_TRL = """def reward(prompt, response, answer, info):
    columns = {{name: [value] for name, value in info.items()}}
    return {function}(prompts=[prompt], completions=[response], answer=[answer], **columns)[0]"""
WRAP_VERL = """def reward(prompt, response, answer, info):
    result = {function}(info.get("data_source"), response, answer, info.get("extra_info"))
    return result["score"] if isinstance(result, dict) else result"""

Score = Callable[[dict[str, Any]], float | None]


def load(target: Target) -> Score:
    """Return what scores a sample by a target; a built-in reward says None of a response that broke its checker."""
    if target.kind != "builtin":
        return _function(target)
    # Workers that run a function of the user's start faster without it.
    from flotilla_reward.builtin import Sample, Unreadable
    from flotilla_reward.table import BUILTIN

    builtin = BUILTIN[target.source](**target.parameters)
    builtin.prepare()

    def score(sample: dict[str, Any]) -> float | None:
        try:
            return builtin.score(Sample(**sample))
        except Unreadable:
            return None

    return score


def _function(target: Target) -> Score:
    call = user_function(target)
    if inspect.iscoroutinefunction(call):
        raise Refusal(
            f"{target.function} is an async function, which nothing awaits here. Name a function like this one "
            f"instead:\n{WRAP_ASYNC.format(function=target.function)}"
        )
    expected = {"prompt": "", "response": "", "answer": "", "info": {}, **target.parameters}
    try:
        inspect.signature(call).bind(**expected)
    except TypeError as error:
        raise Refusal(
            f"{target.function}{inspect.signature(call)} cannot be called with "
            f"({', '.join(f'{name}=' for name in expected)}): {error}{_way_to_call(target.function, call)}"
        ) from error

    def score(sample: dict[str, Any]) -> float:
        return number_of(call(**sample, **target.parameters))

    return score


def _way_to_call(name: str, call: Callable[..., object]) -> str:
    """Return what to write for a function that was made for another program; empty for any other."""
    names = inspect.signature(call).parameters
    for mark, program, wrapper in (("completions", "TRL", WRAP_TRL), ("solution_str", "verl", WRAP_VERL)):
        if mark in names:
            instead = wrapper.format(function=name)
            return f".\nIt is written for {program}. Name a function like this one instead:\n{instead}"
    return ""


def number_of(returned: object) -> float:
    """Return the finite number that a function returned; an array or tensor of one number is that number."""
    if not isinstance(returned, numbers.Real) and getattr(returned, "shape", None) == ():
        returned = returned.item()  # type: ignore[attr-defined]
    if not isinstance(returned, numbers.Real):
        raise Refusal(
            f"returned {returned!r:.200} of type {type(returned).__name__}, expected a number{_way_to_return(returned)}"
        )
    try:
        value = float(returned)
    except OverflowError:
        raise Refusal("returned an integer too large for a float") from None
    if not math.isfinite(value):
        raise Refusal(f"returned {value}, expected a finite number")
    return value


def _way_to_return(returned: object) -> str:
    """Return how to make a number of what is often returned in its place."""
    if inspect.iscoroutine(returned):
        returned.close()  # Python warns of one that nobody awaits.
        return ": wrap the call in asyncio.run(...)"
    if isinstance(returned, dict):
        key = next((key for key in ("score", "reward", *returned) if key in returned), "score")
        return f": return one of its values, such as result[{key!r}]"
    if isinstance(returned, list | tuple) and len(returned) == 1:
        return ": a reward scores one response, so return result[0]"
    return ""
