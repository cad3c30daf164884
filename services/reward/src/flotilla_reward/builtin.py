"""Rewards that compare with an answer, and the base of all that come with the service.

Invariants: the fields are the reward's parameters and the docstring is what `ListRewards` shows, so neither can drift
from the code. A reward that is not `bounded` runs in a process that can be killed: math-verify's own time limits use
SIGALRM, so they are off.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation, localcontext
from functools import lru_cache
from importlib import metadata
from itertools import permutations
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flotilla_workers.functions import Refusal

# Each part starts with a character that the part before cannot hold: matching takes linear time.
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# Enough to tell neighbouring numbers of the tolerances below apart.
PRECISION = 50

DIGIT = re.compile(r"[0-9]")
TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

# What marks an expression within prose.
MARKED = re.compile(r"\$\$.+?\$\$|(?<!\\)\$.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
WORD = re.compile(r"[^\W\d_]{2}")
COMMAND = re.compile(r"\\[A-Za-z]+")
BOX = r"\boxed{"
PERCENT = re.compile(r"(?<!\\)%")
POWER_OF_TEN = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,4})(?!\w|\.[0-9])")
# The last number of prose, as a word that is no part of a larger expression.
LAST_POWER_OF_TEN = re.compile(
    r"(?<!\S)(?<![-+*/^(] )([-+]?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]{1,4})(?![\w+*/^-])(?! [-+*/^])(?=[^0-9]*+\Z)"
)
SPACE_OF_THOUSANDS = re.compile(r"(?<=[0-9])\\[,;:!](?=[0-9]{3}(?![0-9]))")
MOST_ITEMS = 64
"""The most commas of an expression, beside twice those of the answer."""
MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix)\}.*?\\end\{\1\}", re.DOTALL)

# A whole number at the end, before which nothing can be part of a larger expression; math-verify takes what ends last,
# unless the text says "answer", or has a box.
LAST_WHOLE = re.compile(r"[^\s\d.+\-*\xd7/^()\xf7]\s+([1-9][0-9]{0,299})\s*\Z")
LONGEST_END = 400
STATED = re.compile(r"^[ \t]*####+[ \t]*([^\s#][^\n#]*?)\s*\Z", re.MULTILINE)
"""The mark of an answer at the beginning of the last line of a response, and what follows it."""

WHOLE = re.compile(r"[0-9]{1,300}", re.ASCII)
"""Digits that sympy reads as one whole number; Python refuses to convert very long ones."""


class Sample(NamedTuple):
    """One response with what the data set says about it."""

    prompt: str
    response: str
    answer: str
    info: dict[str, Any]
    means: dict[str, Any] | None = None
    """The jail and the time limit, for a reward that runs code of responses."""


class CannotScore(Refusal):
    """The sample cannot be judged, for example because its answer is missing: an error, never a score."""


class Unverifiable(Exception):
    """The response made its verifier fail: `on_unverifiable` of the term says what that is worth."""


class Unreadable(Unverifiable):
    """The response cannot be read by a checker of ours."""


class Judged(float):
    """A score, with the numbers that it is made of, the answer that was read in the response, and why it is no more."""

    parts: dict[str, float]
    extracted: str | None
    why: str

    def __new__(
        cls,
        value: float,
        *,
        parts: dict[str, float] | None = None,
        extracted: str | None = None,
        why: str = "",
    ) -> Self:
        """Return the score."""
        made = super().__new__(cls, value)
        made.parts, made.extracted, made.why = parts or {}, extracted, why
        return made


class BuiltinReward(BaseModel):
    """A reward and its parameters.

    Each describes itself in place: docstrings would make pydantic parse this file for every reward at each start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    bounded: ClassVar[bool]
    """True where the time grows no faster than the text, whatever the text: such a reward runs inside the service."""
    jailed: ClassVar[bool] = False
    """True where code of others sees the response and may run it: such a reward runs where functions of users do."""
    blames_response: ClassVar[bool] = False
    """A response that takes too long, or ends the worker, is unverifiable: nothing else could be the reason."""
    runs_code: ClassVar[bool] = False
    """True where it runs code of responses in a jail, so that it needs a host that has one."""
    rules: ClassVar[int] = 1
    """A number that grows whenever a response may be judged differently than before."""
    judges_by: ClassVar[tuple[str, ...]] = ()
    """Packages whose rules are among its own."""

    def require(self) -> None:
        """Raise where this host lacks what scoring needs."""

    def prepare(self) -> None:
        """Import what scoring needs, so that it takes nothing of the time of a sample."""

    @abstractmethod
    def score(self, sample: Sample) -> float:
        """Return the score, also as `Judged`; raise `CannotScore`, or `Unverifiable`, which blames the response."""

    @classmethod
    def version(cls) -> str:
        """Return what decides how a response is judged."""
        packages = ("flotilla-reward", *cls.judges_by)
        names = (f"{name.removesuffix('-reward')} {metadata.version(name)}" for name in packages)
        return f"{', '.join(names)}, rules {cls.rules}"


def answer_of(sample: Sample) -> str:
    """Return the right answer, stripped; a sample without one cannot be compared."""
    answer = sample.answer.strip()
    if not answer:
        raise CannotScore("the sample has no answer to compare with: check data.answer_field of the run")
    return answer


def text_after(marker: str | None, response: str) -> str | None:
    """Return what follows the last `marker`, or all of `response` without a marker; None if the marker is missing."""
    if marker is None:
        return response
    _, found, rest = response.rpartition(marker)
    return rest if found else None


class Exact(BuiltinReward):
    """Comparison of texts.

    1 when the response is the answer, character by character; else 0. Outer white space does not count.
    """

    bounded: ClassVar[bool] = True

    after: str | None = Field(
        default=None,
        min_length=1,
        description="Compare only what follows the last such marker; a response without it scores 0.",
    )
    ignore_case: bool = Field(default=False, description="Upper and lower case are the same.")

    def score(self, sample: Sample) -> float:
        answer = answer_of(sample)
        text = text_after(self.after, sample.response)
        if text is None:
            return 0.0
        text = text.strip()
        if self.ignore_case:
            text, answer = text.casefold(), answer.casefold()
        return Judged(text == answer, extracted=text)


class Numeric(BuiltinReward):
    """Comparison of numbers.

    1 when the last number of the response is within a tolerance of the answer; else 0.
    """

    bounded: ClassVar[bool] = True

    after: str | None = Field(
        default=None,
        min_length=1,
        description="Look only at what follows the last such marker; a response without it scores 0.",
    )
    absolute_tolerance: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Allowed difference. The larger one of both tolerances counts.",
    )
    relative_tolerance: float = Field(
        default=1e-9, ge=0, allow_inf_nan=False, description="Allowed difference as a share of the answer."
    )

    def score(self, sample: Sample) -> float:
        expected = _number(answer_of(sample))
        if expected is None:
            raise CannotScore(f"the answer {sample.answer!r:.200} is not a number")
        text = text_after(self.after, sample.response)
        numbers = NUMBER.findall(text) if text is not None else []
        got = _number(numbers[-1]) if numbers else None
        if got is None:
            return 0.0
        with localcontext(prec=PRECISION) as context:
            context.clear_traps()
            allowed = max(Decimal(self.absolute_tolerance), Decimal(self.relative_tolerance) * abs(expected))
            return Judged(abs(got - expected) <= allowed, extracted=str(got.normalize()))


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


class Format(BuiltinReward):
    """The shape of a response, whatever it says.

    1 when the response is tagged sections, each once, in order, with nothing around them; else 0.
    """

    bounded: ClassVar[bool] = True

    sections: tuple[str, ...] = Field(
        default=("think", "answer"),
        min_length=1,
        description="Tag names: `think` stands for `<think>...</think>`.",
    )
    allow_empty: bool = Field(default=False, description="A section may hold nothing but white space.")

    @field_validator("sections")
    @classmethod
    def _tags(cls, sections: tuple[str, ...]) -> tuple[str, ...]:
        for name in sections:
            if not TAG_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a tag name: letters, digits, _ and -, without brackets")
        if len(set(sections)) != len(sections):
            raise ValueError("a section is named twice")
        return sections

    def score(self, sample: Sample) -> float:
        rest = sample.response
        for name in self.sections:
            opening, closing = f"<{name}>", f"</{name}>"
            if sample.response.count(opening) != 1 or sample.response.count(closing) != 1:
                return 0.0
            before, opened, rest = rest.partition(opening)
            content, closed, rest = rest.partition(closing)
            if not opened or not closed or before.strip():
                return 0.0
            if not content.strip() and not self.allow_empty:
                return 0.0
        return float(not rest.strip())


# It warns about its missing time limit at every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class Math(BuiltinReward):
    r"""Mathematical equality, by math-verify.

    1 when the final expression of the response (best in `\boxed{}`, or behind `####` on the last line) equals the
    answer; else 0, also for a response that breaks the checker or keeps it busy until the limit.
    """

    # Simplification may never end.
    bounded: ClassVar[bool] = False
    blames_response: ClassVar[bool] = True
    judges_by: ClassVar[tuple[str, ...]] = ("math-verify", "sympy")
    rules: ClassVar[int] = 4

    significant_digits: int = Field(
        default=15, ge=1, le=50, description="Precision of comparisons that have to be done numerically."
    )
    decimals: int = Field(
        default=6,
        ge=0,
        le=50,
        description="Decimal numbers are rounded to so many places before they are compared.",
    )

    def prepare(self) -> None:
        from math_verify import parser  # type: ignore[import-untyped]

        parser.Number = _as_sympy

    def score(self, sample: Sample) -> float:
        answer = answer_of(sample)
        try:
            expected = _expected(answer)
        # Whatever the text of a data set makes of sympy.
        except Exception as error:
            raise CannotScore(f"the answer {answer!r:.200} cannot be read: {error!r:.200}") from error
        if not expected:
            raise CannotScore(f"the answer {answer!r:.200} is not an expression that can be read")
        right, response = _whole(expected), _stated(sample.response)
        if right is not None and (told := _last_whole(response)) is not None:
            return Judged(float(int(told) == right), extracted=answer if int(told) == right else told)
        try:
            told = None
            _refuse_long_lists(response, answer)
            for text in _readings(response):
                read = _expressions(text)
                if self._equal(expected, read):
                    # Expressions that are equal and look different are one answer.
                    return Judged(1.0, extracted=answer)
                told = str(read[-1]) if read else told
            return Judged(0.0, extracted=told)
        # Whatever the text of a model makes of sympy.
        except Exception as error:
            raise Unreadable(f"{error!r:.200}") from error

    def _equal(self, expected: tuple[Any, ...], response: list[Any]) -> bool:
        from math_verify import verify

        if (whole := _whole(expected)) is not None and (told := _whole(response)) is not None:
            return whole == told
        rules = {"float_rounding": self.decimals, "numeric_precision": self.significant_digits}
        return any(
            verify(right, told, **rules, timeout_seconds=None, raise_on_error=True)
            for right, told in (([*expected], response), *_as_meant(expected, response))
        )


def _expressions(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(_as_math_verify_writes(text), parsing_timeout=None, raise_on_error=True)
    return found


def _as_math_verify_writes(text: str) -> str:
    """Return a text with what math-verify does not read in the form that it reads."""
    if BOX not in text and not MARKED.search(text):
        text = LAST_POWER_OF_TEN.sub(r"$\1$", text)
    text = POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text)
    text = SPACE_OF_THOUSANDS.sub("", text).replace("\N{DEGREE SIGN}", r"^\circ ")
    text = text.replace(r"\varnothing", r"\emptyset")
    if BOX not in text and not MARKED.search(text):
        text = MATRIX.sub(r"$\g<0>$", text)
    return text


@lru_cache(maxsize=4096)
def _expected(answer: str) -> tuple[Any, ...]:
    """Return what an answer says: the responses to a prompt share it."""
    if WHOLE.fullmatch(answer) and answer == str(int(answer)):
        return _as_sympy(answer), answer
    return tuple(_expressions(_boxed(answer)))


def _as_sympy(text: str) -> Any:
    """Return the number of a text as sympy does, which takes digits for a program of Python's."""
    from sympy import Integer, Number  # type: ignore[import-untyped]

    return Integer(int(text)) if WHOLE.fullmatch(text) else Number(text)


def _whole(read: Sequence[Any]) -> int | None:
    """Return the whole number that was read, where nothing else was: two of these are equal or not without sympy."""
    match read:
        case [value, str(text)] if WHOLE.fullmatch(text) and getattr(value, "is_Integer", False):
            return int(value) if int(value) == int(text) else None
    return None


def _as_meant(
    expected: Sequence[Any], response: Sequence[Any]
) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Give both as one is written: an inequality as an interval, and a lonely i as the imaginary unit."""
    from sympy import And, Expr, I, Rel, Set

    if not expected or not response:
        return
    right, told = expected[0], response[0]
    if isinstance(right, Set) and isinstance(told, Rel | And) and len(told.free_symbols) == 1:
        atoms = told.args if isinstance(told, And) else (told,)
        if all(
            isinstance(atom, Rel) and any(a.is_Symbol and b.is_number for a, b in permutations(atom.args))
            for atom in atoms
        ):
            yield [right], [told.as_set()]
    both = isinstance(right, Expr) and isinstance(told, Expr)
    symbols = [*right.free_symbols, *told.free_symbols] if both else []
    if len(symbols) == 1 and symbols[0].name == "i":
        yield [right.subs(symbols[0], I)], [told.subs(symbols[0], I)]


def _refuse_long_lists(response: str, answer: str) -> None:
    """Refuse an expression with many items: to compare numbers that collide takes the square of their count."""
    most = MOST_ITEMS + 2 * answer.count(",")
    # Prose between two prices in dollars is no expression.
    found = [one for one in MARKED.findall(response) if not WORD.search(COMMAND.sub("", one))]
    for marked in (*found, _last_box(response)):
        if (items := marked.count(",")) > most:
            raise Unreadable(f"it lists {items} items, and the answer {answer.count(',') + 1}")


def _last_box(response: str) -> str:
    """Return what is in the last box, up to its own closing brace; empty where there is none."""
    first = response.rfind(BOX) + len(BOX)
    if first < len(BOX):
        return ""
    depth = 1
    for place in range(first, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if not depth:
            return response[first:place]
    return response[first:]


def _stated(response: str) -> str:
    """Return what the last line states as the answer, as GSM8K writes it, or else the whole response.

    What has no digit may be a heading.
    """
    found = None if BOX in response else STATED.search(response, max(0, len(response) - LONGEST_END))
    return f"#### {found[1]}" if found and DIGIT.search(found[1]) else response


def _last_whole(response: str) -> str | None:
    """Return the whole number that math-verify reads in a response, where that is plain without a search for others."""
    found = LAST_WHOLE.search(response, max(0, len(response) - LONGEST_END))
    if found is None or BOX in response or "answer" in response.casefold():
        return None
    return found[1]


def _boxed(answer: str) -> str:
    """Return the answer as math-verify reads it whole: in a box, where it is not prose that marks its expression."""
    prose, marked = MARKED.subn(" ", answer)
    if BOX in answer or (marked and WORD.search(prose)):
        return answer
    # In LaTeX a bare % begins a comment.
    return BOX + PERCENT.sub(r"\\%", answer) + "}"


def _readings(response: str) -> list[str]:
    """Return the response, and its last box alone where it has several: math-verify takes several boxes for a list."""
    last = response.rfind(BOX)
    return [response, response[last:]] if response.find(BOX) < last else [response]
