"""A program that passes tests.

Invariants: the program of a response runs in a jail of its own, and no expected result is ever in it. Results are
compared in the process of the verifier, and tests that are code run in a second jail, so nothing that a program writes,
prints, replaces or ends is a verdict. A test counts as passed when the verifier saw its result, and else as failed. A
jail that does not start, and tests that cannot run, are errors; whatever happens after a jail has started is the
response's doing, and worth 0.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from flotilla_reward.builtin import BuiltinReward, CannotScore, Judged, Sample, text_after
from flotilla_reward.verifiers.code_tests import Call, Run, Script, Tests, tests_of
from flotilla_reward.verifiers.reading import code_blocks
from flotilla_reward.verifiers.remote import ROOT, Peer, unpacked
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import USERS, Cell, Jail
from flotilla_workers.process import LOAD_LIMIT_S, Timeout, WorkerProcess

JAIL = TypeAdapter(Jail)
OF_JAIL = {"level", "bwrap", "bounds", "readable", "environment"}
"""What tells a jail to a worker that starts processes in it."""
STARTS_S = 60.0
"""The time that the jails of a sample have to start and to end, beside that of its tests."""
PYTHON = ("python", "python3", "py")
IN_JAIL = "flotilla_reward.verifiers.jailed"

Reason = Literal["", "no_program", "wrong_answer", "failed", "timed_out", "too_much_output"]


@dataclass
class Tally:
    """What the tests of one response have shown so far."""

    total: int
    all_count: bool
    ends_at: float = math.inf
    passed: int = 0
    seen: int = 0
    first_failed: int = 0
    reason: Reason = ""
    """Why the first test failed that did; empty while none has."""

    def take(self, reason: Reason) -> None:
        """Take the result of the next test: why it failed, or nothing."""
        self.seen += 1
        if not reason:
            self.passed += 1
        elif not self.first_failed:
            self.first_failed, self.reason = self.seen, reason

    @property
    def goes_on(self) -> bool:
        """Return whether another test is left that can change the result, and has time."""
        return self.seen < self.total and not (self.first_failed and self.all_count) and self.left_s > 0

    @property
    def left_s(self) -> float:
        return self.ends_at - asyncio.get_running_loop().time()

    def judged(self) -> Judged:
        # What was not seen did not pass; it did not run because there was no time.
        if self.passed < self.total and not self.first_failed:
            self.take("timed_out")
        value = float(self.passed == self.total) if self.all_count else self.passed / self.total
        counts = {"passed": self.passed, "total": self.total, "first_failed": self.first_failed}
        reason = {self.reason: 1} if self.reason else {}
        return Judged(value, {name: float(count) for name, count in (counts | reason).items()})


class Code(BuiltinReward):
    """Programs that pass tests.

    1 when the program in the response passes all tests of the row; else 0. It runs in a jail.
    """

    bounded: ClassVar[bool] = False
    runs_code: ClassVar[bool] = True

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

    def score(self, sample: Sample) -> Judged:
        tests = tests_of(sample)
        tally = Tally(tests.least, self.all)
        source = self._source(sample.response)
        if not source.strip():
            tally.take("no_program")
            return tally.judged()
        if sample.means is None:
            raise CannotScore("there is no jail for the program")
        jail = JAIL.validate_python(sample.means["jail"])
        asyncio.run(Verification(self, source, jail, sample.means["limit_s"], tally).run(tests))
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
        return math.isclose(got, expected, rel_tol=self.tolerance, abs_tol=self.tolerance)


class Verification:
    """The tests of one response."""

    def __init__(self, code: Code, source: str, jail: Jail, limit_s: float, tally: Tally) -> None:
        self._code, self._source, self._jail = code, source, jail
        self._limit_s, self._tally = limit_s, tally

    async def run(self, tests: Tests) -> None:
        """Run the tests until the result is known."""
        asked = [
            self._code.build,
            self._code.command,
            *(one.command for one in tests.cases if isinstance(one, Run)),
        ]
        commands = [one for one in asked if one is not None]
        ended = False
        while self._tally.goes_on and not ended:
            async with self._program(commands) as program:
                if tests.script is None:
                    if not await self._begun(program):
                        return
                    await self._cases(program, tests.cases)
                    continue
                async with self._jailed("checks", self._jail, self._parameters(tests.script)) as checks:
                    # Until they say something, tests are only read, and pytest is imported.
                    said = await checks.ask({}, LOAD_LIMIT_S)
                    if isinstance(said, str):
                        raise CannotScore(f"the tests of the row did not begin: {said}")
                    if not await self._begun(program):
                        return
                    ended = await self._script(program, checks, said) or tests.script.kind != "asserts"

    @asynccontextmanager
    async def _jailed(self, loader: str, jail: Jail, parameters: dict[str, Any]) -> AsyncIterator[Jailed]:
        target = Target("builtin", "code", loader, parameters)
        cell = Cell(jail, slot=secrets.randbelow(USERS))
        worker = await WorkerProcess.start(f"{IN_JAIL}:{loader}", cell)
        try:
            failure = await worker.load(target)
            if failure is not None:
                raise CannotScore(f"the jail did not start: {failure.message}")
            yield Jailed(worker, target)
        finally:
            await worker.kill()

    @asynccontextmanager
    async def _program(self, commands: list[str | list[str] | tuple[str, ...]]) -> AsyncIterator[Jailed]:
        parameters = {"source": self._source, "file": self._code.file}
        memory = min(self._jail.bounds.memory_bytes, self._code.memory_mib << 20)
        jail = replace(self._jail, bounds=replace(self._jail.bounds, memory_bytes=memory))
        async with self._jailed("program", jail, parameters) as program:
            # Before any code of the response runs, so that it cannot say this.
            said = await program.ask({"find": commands}, LOAD_LIMIT_S) if commands else {"missing": []}
            if isinstance(said, str) or said["missing"]:
                lacks = said if isinstance(said, str) else said["missing"][0]
                raise CannotScore(
                    f"the command {lacks!r:.200} is not on this host, or not where its jail looks"
                )
            yield program

    def _parameters(self, script: Script) -> dict[str, Any]:
        return {
            "kind": script.kind,
            "source": script.source,
            "entry_point": script.entry_point,
            "module": self._code.file.partition(".")[0],
            "first": self._tally.seen,
        }

    async def _begun(self, program: Jailed) -> bool:
        """Begin to count the time, and build the program; return whether it can be tested."""
        if self._tally.ends_at == math.inf:
            self._tally.ends_at = asyncio.get_running_loop().time() + self._limit_s
        if self._code.build is None:
            return True
        question = {"command": self._code.build, "files": {}, "input": ""}
        said = await program.ask(question, self._tally.left_s)
        reason = said if isinstance(said, str) else _of_run(said)
        if reason:
            self._tally.take(reason)
        return not reason

    def _limit(self) -> float:
        return min(self._code.test_timeout_s, self._tally.left_s)

    async def _cases(self, program: Jailed, cases: Sequence[Run | Call]) -> None:
        """Run the tests that are left, until one of them ends the program's process."""
        lives = True
        while lives and self._tally.goes_on:
            lives = await self._case(program, cases[self._tally.seen])

    async def _case(self, program: Jailed, test: Run | Call) -> bool:
        """Run one test; return whether the program's process still answers."""
        if isinstance(test, Run):
            command = test.command or self._code.command
            question: dict[str, Any] = {"command": command, "files": test.files, "input": test.text}
            said = await program.ask(question, self._limit())
            reason = said if isinstance(said, str) else _of_run(said)
            if not reason and not self._code.same_output(_printed(said), test.output):
                reason = "wrong_answer"
        else:
            said = await program.ask({"asks": _called(test)}, self._limit())
            reason = said if isinstance(said, str) else self._of_call(said, test.result)
        self._tally.take(reason)
        return not isinstance(said, str)

    def _of_call(self, said: dict[str, Any], expected: Any) -> Reason:
        if "says" not in said:
            return "failed"
        try:
            same = self._code.same_value(plain(said["says"]), expected)
        except (NotPlain, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            same = False
        return "" if same else "wrong_answer"

    async def _script(self, program: Jailed, checks: Jailed, first: dict[str, Any]) -> bool:
        """Run tests that are code, from the first that they said; return whether they came to their end."""
        now = asyncio.get_running_loop().time
        said: dict[str, Any] | Reason = first
        began, turn = now(), checks
        while not isinstance(said, str):
            # What the program says is for its tests, whatever it looks like.
            if turn is program or not {"asks", "says", "raised"}.isdisjoint(said):
                question, turn = said, checks if turn is program else program
            elif self._takes(said):
                question, began = {}, now()
            else:
                return True
            if not self._tally.goes_on:
                return True
            said = await turn.ask(
                question, min(self._code.test_timeout_s - (now() - began), self._tally.left_s)
            )
        self._tally.take(said)
        return False

    def _takes(self, said: dict[str, Any]) -> bool:
        """Take what tests say of themselves; return whether they will say more."""
        match said:
            case {"broken": why}:
                raise CannotScore(f"the tests of the row cannot run: {why}")
            case {"total": int(total)}:
                self._tally.total = total
            case {"passed": bool(passed)}:
                self._tally.take("" if passed else "failed")
            case _:  # They are over, and those that are missing did not run.
                self._tally.take("failed")
                return False
        return True


class Jailed:
    """A process of ours in a jail."""

    def __init__(self, worker: WorkerProcess, target: Target) -> None:
        self._worker, self._target = worker, target

    async def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any] | Reason:
        """Return what it says, or why it says nothing more."""
        said = await self._worker.ask(self._target, question, max(limit_s, 0.001), lambda value: value)
        if isinstance(said, Timeout):
            return "timed_out"
        return said if isinstance(said, dict) else "failed"


def _called(test: Call) -> dict[str, Any]:
    pack = Peer().pack
    arguments = [test.function, *map(pack, test.arguments)]
    return {"operation": "named", "of": ROOT, "arguments": arguments, "keywords": pack(test.keywords)}


def _of_run(said: dict[str, Any]) -> Reason:
    """Return why a command failed, whatever it printed."""
    if said.get("output", "") is None:
        return "too_much_output"
    return "failed" if said.get("status") != 0 else ""


def _printed(said: dict[str, Any]) -> str:
    try:
        return b64decode(said["output"]).decode(errors="replace")
    except (KeyError, ValueError, TypeError):
        return "\0"


class NotPlain(Exception):
    """A value is an object of the program's."""


def plain(said: Any) -> Any:
    """Return a value that a function returned, where it is plain."""
    if isinstance(said, list):
        return [plain(one) for one in said]
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    if kind in ("mine", "yours", "exception"):
        raise NotPlain
    return unpacked(kind, content, plain)


def _number(text: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
