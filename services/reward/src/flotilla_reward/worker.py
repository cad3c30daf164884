"""The rewards in a worker: how one is loaded and called, and how what it returns becomes a score.

Functions of users are taken as they are: ours, verl's `compute_score` and TRL's reward functions, each also async.
Invariants: the signature decides once, when a function is loaded, how it is called, and whether with one response or
with all of a group. A score and each part of it are finite, or there is none. A response is blamed only by an exception
of the name `Unverifiable`. Workers that run a function of the user's import nothing heavy of ours.

A score is told as a number, or as a list of it, its parts, the answer that was read in the response, and why it is no
higher. A response that cannot be verified is told as an object, and so are the scores of a group.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
from collections.abc import Awaitable, Callable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from flotilla_workers.functions import Refusal, Target, user_function

try:
    # Half of the memory of a worker would be that of hashlib, whose pages each fork shares one by one.
    from _sha256 import sha256  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha256

if TYPE_CHECKING:
    import asyncio

MOST_PARTS = 64
LONGEST_NAME = 200
LONGEST_WHY = 2_000
VARIABLE_KEYWORDS, COROUTINE = 0x08, 0x80
"""Flags of code, as `inspect` names them."""
MOST_WRAPPERS = 16
LONGEST_PATH, LAST_LINE = 4_096, 1 << 31
OWN = ("prompt", "response", "answer", "info")
TOTALS = ("score", "reward")
"""The keys of a dict under which functions return the number that counts."""
EXTRACTED = ("extracted", "pred")
"""The keys under which functions return the answer that they read in the response; the second one is verl's."""
UNVERIFIABLE = "Unverifiable"
"""The name of an exception, of anybody's, by which a verifier says that the response made it fail."""

Score = Callable[[dict[str, Any]], Any]

IN_JAIL = "flotilla_reward.table"
"""The source of a built-in reward that runs where functions of users do: in the jail, in workers of its run."""


def is_ours(target: Target) -> bool:
    """Return whether a target is a built-in reward."""
    return target.kind == "builtin" or target.source == IN_JAIL


class Facts(NamedTuple):
    """Facts that the service has to know of a function, as its worker tells them."""

    form: str = ""
    """The way in which it is called, where that is not as ours are."""
    whole_groups: bool = False
    token_ids: bool = False
    version: str = ""
    """The beginning of the digest of its file."""
    file: str = ""
    line: int = 0
    """The place where it begins."""

    @classmethod
    def of(cls, told: str) -> Facts:
        """Read what a worker told, where a function's code can say anything; of a built-in reward it tells nothing."""
        facts = cls(**json.loads(told)) if told else cls()
        if [*map(type, facts)] != [*map(type, cls())]:
            raise ValueError("it tells other things of itself")
        if not 0 <= facts.line <= LAST_LINE or len(facts.file.encode()) > LONGEST_PATH:
            raise ValueError("it tells of a place that is none")
        return facts


def load(target: Target) -> Score:
    """Return what scores the responses of a question by a target."""
    if not is_ours(target):
        return Function(target)
    # Workers that run a function of the user's start faster without it.
    from flotilla_reward.builtin import Sample
    from flotilla_reward.table import BUILTIN

    builtin = BUILTIN[target.function or target.source](**target.parameters)
    builtin.prepare()

    def score(question: dict[str, Any]) -> Any:
        (response,) = question["responses"]
        means = question.get("means")
        sample = Sample(question["prompt"], response, question["answer"], question["info"], means)
        try:
            value = builtin.score(sample)
        except Exception as error:  # one that does not blame the response goes on
            if not blames_response(error):
                raise
            return unverifiable(error)
        told = (getattr(value, "parts", {}), getattr(value, "extracted", None), getattr(value, "why", ""))
        return _said(float(value), *told)

    return score


def blames_response(error: object) -> bool:
    """Return whether an exception says that the response made its verifier fail."""
    return isinstance(error, Exception) and any(one.__name__ == UNVERIFIABLE for one in type(error).__mro__)


def unverifiable(error: object) -> dict[str, str]:
    """Return what is told of a response that cannot be verified."""
    return {"unverifiable": str(error)[:LONGEST_WHY]}


class TrainerState:
    """State of the run that TRL's functions may ask for: the steps that were done, and how many there will be."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step = global_step
        self.max_steps = max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name} here, but global_step and max_steps")


def _as_ours(question: dict[str, Any]) -> dict[str, Any]:
    return {**_as_ranked(question), "response": question["responses"][0]}


def _as_ranked(question: dict[str, Any]) -> dict[str, Any]:
    return {name: question[name] for name in RANKED}


def _as_verls(question: dict[str, Any]) -> dict[str, Any]:
    info = question["info"]
    return {
        "data_source": info.get("data_source", ""),
        "solution_str": question["responses"][0],
        "ground_truth": next(iter(question["answer_column"].values()), question["answer"]),
        "extra_info": info.get("extra_info") or {},
    }


def _as_verls_batches(question: dict[str, Any]) -> dict[str, Any]:
    count = len(question["responses"])
    given = {f"{name}s": [value] * count for name, value in _as_verls(question).items()}
    return given | {"solution_strs": question["responses"]}


def _as_trls(question: dict[str, Any]) -> dict[str, Any]:
    chat, responses = question["chat"], question["responses"]
    columns = {"answer": question["answer"], **question["info"], **question["answer_column"]}
    given = {name: [value] * len(responses) for name, value in columns.items()} | {
        "prompts": [chat or question["prompt"]] * len(responses),
        "completions": [[{"role": "assistant", "content": one}] if chat else one for one in responses],
    }
    if "token_ids" in question:
        given["completion_ids"] = question["token_ids"]
    if "step" in question:
        given["trainer_state"] = TrainerState(question["step"], question["total_steps"])
    return given


class Form(NamedTuple):
    """A way in which people write reward functions."""

    told: str
    names: tuple[str, ...]
    """The arguments that are always there."""
    marks: tuple[str, ...]
    """The arguments that tell the form."""
    given: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the arguments for a question, of which a function gets those that it takes."""
    columns: bool = False
    """Other arguments are columns of the row."""
    whole_groups: bool = False
    """True where the function gets all responses of a group, and returns a score for each."""


RANKED = ("prompt", "responses", "answer", "info")
OURS = Form("", OWN, OWN, _as_ours)
RANKING = Form("as a reward of whole groups", RANKED, RANKED, _as_ranked, whole_groups=True)
FOREIGN = (
    Form(
        "as verl's compute_score",
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        ("solution_str",),
        _as_verls,
    ),
    Form(
        "as verl's compute_score of batches, with whole groups",
        ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
        ("solution_strs",),
        _as_verls_batches,
        whole_groups=True,
    ),
    Form(
        "as TRL's reward function, with whole groups",
        ("prompts", "completions"),
        ("completions",),
        _as_trls,
        columns=True,
        whole_groups=True,
    ),
)
OF_THE_RUN = ("completion_ids", "trainer_state")
"""Arguments of TRL's that the run gives, not the row."""
NOT_HERE = ("log_extra", "log_metric")
"""Arguments of TRL's that are not offered."""


class Function:
    """A function of a user's, called as it was written to be."""

    def __init__(self, target: Target) -> None:
        self._call = user_function(target)
        self._parameters = target.parameters
        plain = _plainly(self._call)
        takes = plain or _inspected(self._call)
        forms = (OURS, RANKING, *FOREIGN)
        self._form = next((form for form in forms if {*form.marks} <= {*takes.names}), OURS)
        self._takes_all = takes.everything
        self._takes = {*takes.names}
        expected = [name for name in self._form.names if self._form is OURS or self._passes(name)]
        self._columns = [
            name
            for name in takes.required
            if self._form.columns and name not in (*expected, *self._parameters, *NOT_HERE)
        ]
        given = [*dict.fromkeys((*expected, *self._parameters, *self._columns))]
        if plain is None or not plain.fit(given):
            self._check_call(target, given)
        called = [f"called {self._form.told}"] if self._form.told else []
        if takes.awaited:
            EVENTS.loop()  # The time that it takes to make one is no answer's.
            called.append("awaited")
        self.facts = Facts(
            ", ".join(called),
            self._form.whole_groups,
            self._form.columns and "completion_ids" in takes.names,
            _version_of(target),
            *_place_of(self._call),
        )

    def _check_call(self, target: Target, given: list[str]) -> None:
        """Refuse a function that cannot be called with what it will be given."""
        import inspect

        signature = inspect.signature(self._call)
        if (unknown := {*self._parameters} - self._takes) and not self._takes_all:
            raise Refusal(f"{target.function}{signature} takes no parameter {', '.join(sorted(unknown))}")
        try:
            signature.bind(**dict.fromkeys(given))
        except TypeError as error:
            form, further = f"{self._form.told.partition(',')[0]} ", ""
            if self._form is OURS:
                form, further = (
                    "",
                    f". Functions with {' or '.join(one.marks[0] for one in FOREIGN)} are taken too",
                )
            raise Refusal(
                f"{target.function}{signature} cannot be called {form}with "
                f"({', '.join(f'{name}=' for name in given)}): {error}{further}"
            ) from error

    @property
    def told(self) -> str:
        """Return the facts for the service."""
        return json.dumps(self.facts._asdict())

    def __call__(self, question: dict[str, Any]) -> Any:
        """Return the score of the response, or those of a group."""
        given = self._form.given(question)
        if missing := [name for name in self._columns if name not in given]:
            if missing[0] in OF_THE_RUN:
                raise Refusal(f"takes {missing[0]}, which the coordinator of this call does not give")
            raise Refusal(f"takes the column {missing[0]}, and the row has {', '.join(given)}")
        arguments = {name: value for name, value in given.items() if self._passes(name)}
        count = len(question["responses"])
        try:
            returned = self._call(**(arguments | self._parameters))
            if hasattr(type(returned), "__await__"):
                returned = EVENTS.result_of(returned)
        except Exception as error:  # of several responses nobody knows which one it was
            if count > 1 or not blames_response(error):
                raise
            return _of_each([unverifiable(error)]) if self._form.whole_groups else unverifiable(error)
        return _of_each(scores_of(returned, count)) if self._form.whole_groups else score_of(returned)

    def _passes(self, name: str) -> bool:
        return self._takes_all or name in self._takes


def _version_of(target: Target) -> str:
    """Return the beginning of the digest of the file that defines a function."""
    file = target.source if target.kind == "file" else getattr(sys.modules[target.source], "__file__", None)
    if not file:
        return ""
    with open(file, "rb") as code:
        return f"sha256:{sha256(code.read()).hexdigest()[:16]}"


def _place_of(function: Any) -> tuple[str, int]:
    """Return the file and the line in which a function begins, where it is Python's."""
    for _ in range(MOST_WRAPPERS):
        function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ("", 0)


class Takes(NamedTuple):
    """The arguments that a function takes by keyword."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    everything: bool
    """It takes any other name too."""
    awaited: bool

    def fit(self, given: list[str]) -> bool:
        """Return whether a call with these names is right."""
        return {*self.required} <= {*given} and (self.everything or {*given} <= {*self.names})


def _plainly(function: Callable[..., Any]) -> Takes | None:
    """Return what a plain function takes; None where only `inspect` can say, without which a worker starts faster."""
    if (
        type(function) is not FunctionType
        or hasattr(function, "__wrapped__")
        or hasattr(function, "__signature__")
    ):
        return None
    code, count = function.__code__, function.__code__.co_argcount
    if code.co_posonlyargcount:
        return None
    names = code.co_varnames[: count + code.co_kwonlyargcount]
    optional = {*names[count - len(function.__defaults__ or ()) : count], *(function.__kwdefaults__ or {})}
    required = tuple(name for name in names if name not in optional)
    return Takes(names, required, bool(code.co_flags & VARIABLE_KEYWORDS), bool(code.co_flags & COROUTINE))


def _inspected(function: Callable[..., Any]) -> Takes:
    import inspect
    from inspect import Parameter

    takes = inspect.signature(function).parameters
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return Takes(
        tuple(takes),
        tuple(name for name, one in takes.items() if one.default is Parameter.empty and one.kind in named),
        any(one.kind is Parameter.VAR_KEYWORD for one in takes.values()),
        inspect.iscoroutinefunction(function),
    )


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

    def forget(self) -> None:
        """Make a new loop when one is needed: two processes cannot share one."""
        self._loop = None

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
os.register_at_fork(after_in_child=EVENTS.forget)


def _of_each(scores: list[Any]) -> dict[str, list[Any]]:
    return {"each": scores}


def scores_of(returned: Any, count: int) -> list[Any]:
    """Return the score of each response of a group, or why it has none."""
    returned = _scalar(returned)
    single = isinstance(returned, dict | str) or not hasattr(returned, "__len__")
    if single and count == 1:
        returned = [returned]
    elif single:
        raise Refusal(
            f"returned {returned!r:.200} of type {type(returned).__name__}, expected a list of {count} scores"
        )
    if len(returned) != count:
        raise Refusal(f"returned {len(returned)} scores for {count} responses")
    return [_told_of(score) for score in returned]


def _told_of(score: Any) -> Any:
    if blames_response(score):
        return unverifiable(score)
    try:
        if score is None:
            raise Refusal(
                "returned None, by which TRL leaves a response out of one reward: here each scores every response"
            )
        return score_of(score)
    except Refusal as error:
        return {"failed": str(error)}


def score_of(returned: Any) -> float | list[Any]:
    """Return the number that a function returned; with its parts where it is in a dict that has further numbers."""
    if isinstance(returned, list | tuple) and len(returned) == 1:
        (returned,) = returned
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
    extracted = next((returned[key] for key in EXTRACTED if key in returned), None)
    return _said(value, parts, str(extracted) if isinstance(extracted, str | int | float) else None)


def _said(value: float, parts: dict[str, float], extracted: str | None, why: str = "") -> float | list[Any]:
    """Return how a score is told, the shortest way."""
    if why:
        return [value, parts, extracted and extracted[:LONGEST_WHY], why[:LONGEST_WHY]]
    if extracted is not None:
        return [value, parts, extracted[:LONGEST_WHY]]
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
