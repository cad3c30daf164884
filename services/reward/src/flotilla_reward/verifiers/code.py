"""A program that passes tests.

Invariants: a test counts as passed when the verifier saw its result, and else as failed. What is expected is known to
this process alone, and the program runs in a jail. What starts jails is imported where it is used, so that workers of
other rewards start fast.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field

from flotilla_reward.builtin import BuiltinReward, CannotScore, Judged, Sample, text_after
from flotilla_reward.verifiers.code_tests import tests_of
from flotilla_reward.verifiers.reading import code_blocks

PYTHON = ("python", "python3", "py")


class Code(BuiltinReward):
    """Programs that pass tests.

    1 when the program in the response passes all tests of the row; else 0. It runs in a jail.
    """

    bounded: ClassVar[bool] = False
    runs_code: ClassVar[bool] = True
    rules: ClassVar[int] = 2

    program: Literal["last_block", "response"] = Field(
        default="last_block",
        description="The last fenced block that is labelled as the language, or has no label; or all of the response.",
    )
    after: str | None = Field(
        default=None, min_length=1, description="Look only at what follows the last such marker."
    )
    language: str | None = Field(
        default=None,
        description="The label of the block; by default that of Python, and any label where `command` is set.",
    )
    all: bool = Field(
        default=True, description="All tests have to pass; else the value is the share that does."
    )
    command: str | tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="The command that runs the program on an input; by default Python runs `file`.",
    )
    build: str | None = Field(
        default=None,
        min_length=1,
        description="The command that runs once before the tests; it has to succeed.",
    )
    file: str = Field(
        default="solution.py",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)?$",
        description="The name of the program's file; without its ending, that of the module that tests import.",
    )
    test_timeout_s: float = Field(
        default=4.0,
        gt=0,
        le=86_400,
        description="Time limit of one test; all tests of a sample have `timeout_s` of the term.",
    )
    memory_mib: int = Field(
        default=1024, ge=64, le=1 << 20, description="Memory of the program, within that of the stack's jail."
    )
    output: Literal["lines", "tokens", "exact"] = Field(
        default="lines",
        description="Comparison of outputs: without white space at the ends of lines, word by word, or whole.",
    )
    tolerance: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Allowed difference of numbers that are no integers, absolute or relative.",
    )

    def prepare(self) -> None:
        from flotilla_reward.verifiers import verification  # noqa: F401 - not in workers of other rewards

    def score(self, sample: Sample) -> Judged:
        from flotilla_reward.verifiers.verification import Rules, Tally, Verification

        tests = tests_of(sample)
        tally = Tally(tests.least, self.all)
        source = self._source(sample.response)
        if not source.strip():
            tally.take("no_program")
            return tally.judged()
        if sample.means is None:
            raise CannotScore("there is no jail for the program")
        rules = Rules(
            self.file,
            self.command,
            self.build,
            self.memory_mib,
            self.test_timeout_s,
            self.same_output,
            self.same_value,
        )
        Verification(source, rules, sample.means, tally).run(tests)
        return tally.judged()

    def _source(self, response: str) -> str:
        """Return the program; nothing where there is none."""
        text = text_after(self.after, response) or ""
        if self.program == "response":
            return text
        blocks = [
            (label.split()[0].lower() if label else "", content) for label, content in code_blocks(text)
        ]
        if self.language is None and self.command is not None:
            return blocks[-1][1] if blocks else ""
        asked = PYTHON if self.language is None else (self.language.lower(),)
        labelled = [content for label, content in blocks if label in asked]
        unlabelled = [content for label, content in blocks if not label]
        return (labelled or unlabelled or [""])[-1]

    def same_output(self, got: str, expected: str) -> bool:
        """Return whether a program printed what is expected."""
        if self.output == "exact":
            return got == expected
        if self.output == "tokens":
            ours, theirs = [got.split()], [expected.split()]
        else:
            ours, theirs = (
                [line.rstrip().split(" ") for line in text.rstrip().split("\n")] for text in (got, expected)
            )
        if len(ours) != len(theirs) or any(len(a) != len(b) for a, b in zip(ours, theirs, strict=True)):
            return False
        pairs = ((a, b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))
        return all(a == b or self._near(_number(a), _number(b)) for a, b in pairs)

    def same_value(self, got: Any, expected: Any) -> bool:
        """Return whether a function returned what is expected, of which the row has what JSON can tell."""
        if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
            return len(got) == len(expected) and all(map(self.same_value, got, expected))
        if isinstance(got, dict) and isinstance(expected, dict):
            ours = {str(key): value for key, value in got.items()}
            theirs = {str(key): value for key, value in expected.items()}
            return ours.keys() == theirs.keys() and all(
                self.same_value(ours[key], theirs[key]) for key in ours
            )
        return bool(got == expected) or self._near(got, expected)

    def _near(self, got: Any, expected: Any) -> bool:
        """Return whether two numbers are within the tolerance, of which one at least is no integer."""
        numbers = [one for one in (got, expected) if isinstance(one, int | float)]
        if len(numbers) < 2 or not self.tolerance or all(isinstance(one, int) for one in numbers):
            return False
        try:
            return math.isclose(got, expected, rel_tol=self.tolerance, abs_tol=self.tolerance)
        except OverflowError:  # An integer beyond all floats is near none.
            return False


def _number(text: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
