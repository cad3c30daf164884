"""The tests of one response, run in jails.

Invariants: the program runs in a jail of its own, and no expected result is ever in it. Results are compared in this
process, and tests that are code run in a second jail. What the program says is a result, or is for its tests, and never
a verdict. A jail that does not start, and tests that cannot run, are errors; whatever happens after that is the
response's doing.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from flotilla_core.errors import Unavailable
from flotilla_reward.builtin import CannotScore, Judged
from flotilla_reward.verifiers.code_tests import Call, Run, Script, Tests
from flotilla_reward.verifiers.remote import ROOT, Peer, unpacked
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import USERS, Cell, Jail
from flotilla_workers.process import LOAD_LIMIT_S, Timeout, WorkerProcess

JAIL = TypeAdapter(Jail)
OF_JAIL = {"level", "bwrap", "bounds", "readable", "environment"}
"""The fields that a worker needs to start processes in a jail."""
STARTS_S = 60.0
"""The time that the jails of a sample have to start and to end, beside that of its tests."""
IN_JAIL = "flotilla_reward.verifiers.jailed"

Command = str | list[str] | tuple[str, ...]
Reason = Literal["", "no_program", "wrong_answer", "failed", "timed_out", "too_much_output"]


@dataclass(frozen=True)
class Rules:
    """The options of a reward that say how tests run, and what is equal."""

    file: str
    command: Command | None
    build: str | None
    memory_mib: int
    test_timeout_s: float
    same_output: Callable[[str, str], bool]
    same_value: Callable[[Any, Any], bool]


@dataclass
class Tally:
    """The results of the tests of one response so far."""

    total: int
    all_count: bool
    ends_at: float = math.inf
    passed: int = 0
    seen: int = 0
    first_failed: int = 0
    reason: Reason = ""
    """The reason of the first failure; empty while there is none."""

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
        parts = {name: float(count) for name, count in (counts | reason).items()}
        return Judged(value, parts=parts)


class Verification:
    """The tests of one response."""

    def __init__(self, source: str, rules: Rules, means: dict[str, Any], tally: Tally) -> None:
        self._source, self._rules, self._tally = source, rules, tally
        self._jail, self._limit_s = JAIL.validate_python(means["jail"]), float(means["limit_s"])

    def run(self, tests: Tests) -> None:
        """Run the tests until the result is known."""
        asyncio.run(self._run(tests))

    async def _run(self, tests: Tests) -> None:
        asked: list[Command | None] = [
            self._rules.build,
            self._rules.command,
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
        try:
            worker = await WorkerProcess.start(f"{IN_JAIL}:{loader}", cell)
        except Unavailable as error:
            raise CannotScore(f"the jail did not start: {error}") from error
        try:
            failure = await worker.load(target)
            if failure is not None:
                raise CannotScore(f"the jail did not start: {failure.message}")
            yield Jailed(worker, target)
        finally:
            await worker.kill()

    @asynccontextmanager
    async def _program(self, commands: list[Command]) -> AsyncIterator[Jailed]:
        parameters = {"source": self._source, "file": self._rules.file}
        memory = min(self._jail.bounds.memory_bytes, self._rules.memory_mib << 20)
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
            "module": self._rules.file.partition(".")[0],
            "first": self._tally.seen,
        }

    async def _begun(self, program: Jailed) -> bool:
        """Begin to count the time, and build the program; return whether it can be tested."""
        if self._tally.ends_at == math.inf:
            self._tally.ends_at = asyncio.get_running_loop().time() + self._limit_s
        if self._rules.build is None:
            return True
        question = {"command": self._rules.build, "files": {}, "input": ""}
        said = await program.ask(question, self._tally.left_s)
        reason = said if isinstance(said, str) else _of_command(said)
        if reason:
            self._tally.take(reason)
        return not reason

    def _limit(self) -> float:
        return min(self._rules.test_timeout_s, self._tally.left_s)

    async def _cases(self, program: Jailed, cases: Sequence[Run | Call]) -> None:
        """Run the tests that are left, until one of them ends the program's process."""
        lives = True
        while lives and self._tally.goes_on:
            lives = await self._case(program, cases[self._tally.seen])

    async def _case(self, program: Jailed, test: Run | Call) -> bool:
        """Run one test; return whether the program's process still answers."""
        if isinstance(test, Run):
            command = test.command or self._rules.command
            question: dict[str, Any] = {"command": command, "files": test.files, "input": test.text}
            said = await program.ask(question, self._limit())
            reason = said if isinstance(said, str) else self._of_run(said, test.output)
        else:
            said = await program.ask({"asks": _called(test)}, self._limit())
            reason = said if isinstance(said, str) else self._of_call(said, test.results)
        self._tally.take(reason)
        return not isinstance(said, str)

    def _of_run(self, said: dict[str, Any], expected: str) -> Reason:
        if reason := _of_command(said):
            return reason
        return "" if self._rules.same_output(_printed(said), expected) else "wrong_answer"

    def _of_call(self, said: dict[str, Any], results: tuple[Any, ...]) -> Reason:
        if "says" not in said:
            return "failed"
        try:
            got = plain(said["says"])
            same = any(self._rules.same_value(got, expected) for expected in results)
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
                question, min(self._rules.test_timeout_s - (now() - began), self._tally.left_s)
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


def _of_command(said: dict[str, Any]) -> Reason:
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
