"""Instructions that a program can check: which ones a response follows.

Invariants: an instruction is checked against its kind before any response is read; an unknown kind or parameter is an
error of the data, never a score. A response without any visible text follows nothing.
"""

from __future__ import annotations

import difflib
import inspect
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from flotilla_reward.builtin import BuiltinReward, CannotScore, Sample
from flotilla_reward.verifiers.instruction_kinds import KINDS, RAW
from flotilla_reward.verifiers.reading import visible

COLUMN = "instructions"
BOUNDS = frozenset({"at_least", "at_most"})


class Instruction(NamedTuple):
    """One instruction, with parameters that its kind takes."""

    kind: str
    parameters: dict[str, Any]

    def followed_by(self, response: str, seen: str) -> bool:
        """Return whether a response follows it, also given as a reader sees it."""
        return bool(seen) and KINDS[self.kind](response if self.kind in RAW else seen, **self.parameters)


class Instructions(BuiltinReward):
    """Instructions that a program can check.

    1 when the response follows all instructions of the row, such as `{kind: words, at_most: 100}`; else 0, or the
    share that it follows.
    """

    bounded: ClassVar[bool] = True
    rules: ClassVar[int] = 2

    instructions: list[dict[str, Any]] | None = Field(
        default=None,
        min_length=1,
        description="Objects of `kind` and its parameters; by default the column `instructions` of the row.",
    )
    mode: Literal["strict", "loose"] = Field(
        default="strict",
        description="`loose` also takes a response that follows without its first or last line, or its asterisks.",
    )
    value: Literal["all", "share"] = Field(
        default="all", description="`all` gives 1 or 0, `share` the share of instructions that are followed."
    )

    @field_validator("instructions")
    @classmethod
    def _known(cls, instructions: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        try:
            read_instructions(instructions or [])
        except CannotScore as error:
            raise ValueError(str(error)) from error
        return instructions

    def score(self, sample: Sample) -> float:
        given = self.instructions if self.instructions is not None else sample.info.get(COLUMN)
        if not given:
            raise CannotScore(f"the row has no instructions in {COLUMN}, and there are none as a parameter")
        instructions = read_instructions(given)
        texts = [sample.response] if self.mode == "strict" else loosened(sample.response)
        seen = [(text, visible(text)) for text in texts]
        followed = [any(item.followed_by(*pair) for pair in seen) for item in instructions]
        return sum(followed) / len(followed) if self.value == "share" else float(all(followed))


def loosened(response: str) -> list[str]:
    """Return the response as it is, and without what often surrounds an answer."""
    lines = response.strip().split("\n")
    parts = (lines, lines[1:], lines[:-1], lines[1:-1])
    texts = ["\n".join(part) for part in parts]
    return list(dict.fromkeys([response, *texts, *(text.replace("*", "") for text in texts)]))


def read_instructions(given: Any) -> list[Instruction]:
    """Return the instructions of a row or of the parameters."""
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise CannotScore(f"{COLUMN} is no list of objects such as {{kind: words, at_most: 100}}")
    return [_read(item) for item in given]


def _read(item: dict[str, Any]) -> Instruction:
    kind = item.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CannotScore(f"there is no kind of instruction {kind!r:.100}{_nearest(str(kind), list(KINDS))}")
    given = {name: value for name, value in item.items() if name != "kind"}
    known = list(_parameters(kind).model_fields)
    try:
        # Only what was given: defaults are those of the function.
        parameters = _parameters(kind)(**given).model_dump(exclude_unset=True)
    except ValidationError as error:
        problems = [_problem(problem, known) for problem in error.errors()]
        raise CannotScore(f"instruction {kind}: {'; '.join(problems)}") from error
    if set(known) >= BOUNDS and not BOUNDS & set(given):
        raise CannotScore(f"instruction {kind}: at_least or at_most is needed")
    return Instruction(kind, parameters)


def _problem(problem: Any, known: list[str]) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return (
            f"unknown parameter {name}{_nearest(name, known) or '; it takes ' + (', '.join(known) or 'none')}"
        )
    return f"{name}: {problem['msg']}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]}?)" if close else ""


@cache
def _parameters(kind: str) -> type[BaseModel]:
    """Return the model of a kind's parameters, which are the keywords of its function."""
    hints = get_type_hints(KINDS[kind], include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(KINDS[kind]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return create_model(kind, __config__=ConfigDict(extra="forbid", frozen=True), **fields)
