"""The rewards in a worker: how one is loaded and called, and how what it returns becomes a score.

Functions of users are taken as they are: ours, verl's `compute_score` and TRL's reward functions, each also async.
Invariants: the signature decides once, when a function is loaded, how it is called. A score and each part of it are
finite, or there is none. Workers that run a function of the user's import nothing heavy of ours.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from flotilla_workers.functions import Refusal, Target, user_function

if TYPE_CHECKING:
    import asyncio

MOST_PARTS = 64
LONGEST_NAME = 200
OWN = ("prompt", "response", "answer", "info")
TOTALS = ("score", "reward")
"""The keys of a dict under which functions return the number that counts."""

Score = Callable[[dict[str, Any]], Any]

IN_JAIL = "flotilla_reward.table"
"""The source of a built-in reward that runs where functions of users do: in the jail, in workers of its run."""


def is_ours(target: Target) -> bool:
    """Return whether a target is a built-in reward."""
    return target.kind == "builtin" or target.source == IN_JAIL


def load(target: Target) -> Score:
    """Return what scores a sample by a target; a built-in reward says None of a response that broke its checker."""
    if not is_ours(target):
        return Function(target)
    # Workers that run a function of the user's start faster without it.
    from flotilla_reward.builtin import Sample, Unreadable
    from flotilla_reward.table import BUILTIN

    builtin = BUILTIN[target.function or target.source](**target.parameters)
    builtin.prepare()

    def score(sample: dict[str, Any]) -> float | None:
        try:
            return builtin.score(Sample(**sample))
        except Unreadable:
            return None

    return score


def _as_ours(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in OWN}


def _as_verls(sample: dict[str, Any]) -> dict[str, Any]:
    info = sample["info"]
    return {
        "data_source": info.get("data_source", ""),
        "solution_str": sample["response"],
        "ground_truth": next(iter(sample["answer_column"].values()), sample["answer"]),
        "extra_info": info.get("extra_info") or {},
    }


def _as_trls(sample: dict[str, Any]) -> dict[str, Any]:
    chat, response = sample["chat"], sample["response"]
    columns = {"answer": sample["answer"], **sample["info"], **sample["answer_column"]}
    return {name: [value] for name, value in columns.items()} | {
        "prompts": [chat or sample["prompt"]],
        "completions": [[{"role": "assistant", "content": response}] if chat else response],
    }


@dataclass(frozen=True)
class Form:
    """A way in which people write reward functions."""

    told: str
    names: tuple[str, ...]
    """The arguments that are always there."""
    marks: tuple[str, ...]
    """The arguments that tell the form."""
    given: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the arguments for a sample, of which a function gets those that it takes."""
    columns: bool = False
    """Other arguments are columns of the row."""


OURS = Form("", OWN, OWN, _as_ours)
FOREIGN = (
    Form(
        "verl's compute_score",
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        ("solution_str",),
        _as_verls,
    ),
    Form("TRL's reward function", ("prompts", "completions"), ("completions",), _as_trls, columns=True),
)
NOT_HERE = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's that no row has."""


class Function:
    """A function of a user's, called as it was written to be."""

    def __init__(self, target: Target) -> None:
        self._call = user_function(target)
        self._parameters = target.parameters
        signature = inspect.signature(self._call)
        takes = signature.parameters
        self._form = next((form for form in (OURS, *FOREIGN) if {*form.marks} <= {*takes}), OURS)
        self._takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in takes.values())
        self._takes = {*takes}
        expected = [name for name in self._form.names if self._form is OURS or self._passes(name)]
        required = [name for name, one in takes.items() if _is_required(one)]
        self._columns = [
            name
            for name in required
            if self._form.columns and name not in (*expected, *self._parameters, *NOT_HERE)
        ]
        given = [*dict.fromkeys((*expected, *self._parameters, *self._columns))]
        try:
            signature.bind(**dict.fromkeys(given))
        except TypeError as error:
            form, further = f"as {self._form.told} ", ""
            if self._form is OURS:
                form, further = (
                    "",
                    f". Functions with {' or '.join(one.marks[0] for one in FOREIGN)} are taken too",
                )
            raise Refusal(
                f"{target.function}{signature} cannot be called {form}with "
                f"({', '.join(f'{name}=' for name in given)}): {error}{further}"
            ) from error
        called = [f"called as {self._form.told}"] if self._form.told else []
        if inspect.iscoroutinefunction(self._call):
            EVENTS.loop()  # The time that it takes to make one is no answer's.
            called.append("awaited")
        self.told = ", ".join(called)
        """The way in which it is called, where that is not as ours are."""

    def __call__(self, sample: dict[str, Any]) -> float | list[Any]:
        given = self._form.given(sample)
        if missing := [name for name in self._columns if name not in given]:
            raise Refusal(f"takes the column {missing[0]}, and the row has {', '.join(given)}")
        arguments = {name: value for name, value in given.items() if self._passes(name)}
        returned = self._call(**(arguments | self._parameters))
        if inspect.isawaitable(returned):
            returned = EVENTS.result_of(returned)
        return score_of(returned)

    def _passes(self, name: str) -> bool:
        return self._takes_all or name in self._takes


def _is_required(parameter: Parameter) -> bool:
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return parameter.default is Parameter.empty and parameter.kind in named


class Events:
    """The event loop of this worker: what functions keep in it, such as connections, serves their next calls."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which is made where there is none."""
        # Workers without async functions start faster without it.
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop

    def result_of(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for a result; what never comes is ended with the worker, at the limit."""

        async def awaited() -> Any:
            return await awaitable

        loop = self.loop()
        task = loop.create_task(awaited())
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # It stopped the loop, which the next call shall not find like that.
                self._loop = None


EVENTS = Events()


def score_of(returned: Any) -> float | list[Any]:
    """Return the number that a function returned; with its parts where it is in a dict that has further numbers."""
    if isinstance(returned, list | tuple) and len(returned) == 1:
        (returned,) = returned
        if returned is None:
            raise Refusal(
                "returned None, by which TRL leaves a response out of one reward: here each scores every response"
            )
    if not isinstance(returned, dict):
        return number_of(returned)
    total = next((key for key in TOTALS if key in returned), None)
    if total is None:
        names = ", ".join(str(name) for name in returned if isinstance(name, str))
        raise Refusal(
            f"returned a dict of {names[:LONGEST_NAME] or 'no names'}, expected score or reward in it"
        )
    parts: dict[str, float] = {}
    for name, value in returned.items():
        if isinstance(name, str) and name != total and isinstance(value := _scalar(value), numbers.Real):
            shown = str(name)[:LONGEST_NAME]
            parts[shown] = number_of(value, f" for {shown}")
        if len(parts) > MOST_PARTS:
            raise Refusal(f"returned a dict of more than {MOST_PARTS} numbers beside {total}")
    value = number_of(returned[total])
    return [value, parts] if parts else value


def number_of(returned: object, where: str = "") -> float:
    """Return the finite number that a function returned; an array or tensor of one number is that number."""
    returned = _scalar(returned)
    if not isinstance(returned, numbers.Real):
        raise Refusal(
            f"returned {returned!r:.200} of type {type(returned).__name__}{where}, expected a number"
        )
    try:
        value = float(returned)
    except OverflowError:
        raise Refusal(f"returned an integer too large for a float{where}") from None
    if not math.isfinite(value):
        raise Refusal(f"returned {value}{where}, expected a finite number")
    return value


def _scalar(value: Any) -> Any:
    single = not isinstance(value, numbers.Real) and getattr(value, "shape", None) in ((), (1,))
    return value.item() if single else value
