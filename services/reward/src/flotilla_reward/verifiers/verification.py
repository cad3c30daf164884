"""The tests of one response, run in jails.

Invariants: the program runs in a jail of its own, and no expected result is ever in it. Results are compared in this
process, and tests that are code run in a second jail. What the program says is a result, or is for its tests, and never
a verdict. A jail that does not start, and tests that cannot run, are errors; whatever happens after that is the
response's doing.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from flotilla_core.errors import Unavailable
from flotilla_core.terminal import visible
from flotilla_reward.builtin import CannotScore, Judged
from flotilla_reward.verifiers.code_tests import Call, Run, Script, Tests
from flotilla_reward.verifiers.remote import ROOT, Peer, unpacked
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import USERS, Jail
from flotilla_workers.process import LOAD_LIMIT_S, Failure, Timeout, WorkerProcess
from flotilla_workers.zygotes import Zygotes

JAIL = TypeAdapter(Jail)
OF_JAIL = {"level", "bwrap", "bounds", "readable", "environment", "forks"}
"""The fields that a worker needs to start processes in a jail."""
STARTS_S = 60.0
"""The time that the jails of a sample have to start and to end, beside that of its tests."""
IN_JAIL = "flotilla_reward.verifiers.jailed"
ZYGOTES = Zygotes()
SLOTS = iter(lambda: secrets.randbelow(USERS), None)

MOST_TOLD = 6
"""Failed tests of which is told why."""
LONGEST_TOLD = 300
LONGEST_BRIEF = 80
LATE_S = 0.5
"""The time that a process has to say where it is, when its limit has passed."""
PLACE = re.compile(r'File "[^"]*", line ([0-9]+)')

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
    told: list[str] = field(default_factory=list)
    """How the first tests failed."""

    def take(self, reason: Reason, how: str = "") -> None:
        """Take the result of the next test: why it failed, or nothing; `how` is text of anybody's."""
        self.seen += 1
        if not reason:
            self.passed += 1
            return
        if not self.first_failed:
            self.first_failed, self.reason = self.seen, reason
        if len(self.told) < MOST_TOLD:
            self.told.append(f"test {self.seen}: {shown(how) or reason.replace('_', ' ')}")

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
        return Judged(value, parts=parts, why="; ".join(self.told))


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
        try:
            worker = await ZYGOTES.worker(jail, f"{IN_JAIL}:{loader}", (), SLOTS)
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
        reason, how = (said, program.why) if isinstance(said, str) else _of_command(said)
        if reason:
            self._tally.take(reason, f"the build: {how}")
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
            reason, how = (said, "") if isinstance(said, str) else self._of_run(said, test.output)
            what = f"input {brief(test.text)}"
        else:
            said = await program.ask({"asks": _called(test)}, self._limit())
            reason, how = (said, "") if isinstance(said, str) else self._of_call(said, test.results)
            given = [*map(brief, test.arguments), *(f"{k}={brief(v)}" for k, v in test.keywords.items())]
            what = f"{test.function}({', '.join(given):.{LONGEST_BRIEF}})"
        self._tally.take(reason, f"{what}: {how or program.why}" if reason else "")
        return not isinstance(said, str)

    def _of_run(self, said: dict[str, Any], expected: str) -> tuple[Reason, str]:
        failed = _of_command(said)
        if failed[0]:
            return failed
        printed = _text(said, "output")
        if printed is not None and self._rules.same_output(printed, expected):
            return "", ""
        return "wrong_answer", f"printed {brief(printed)}, expected {brief(expected)}"

    def _of_call(self, said: dict[str, Any], results: tuple[Any, ...]) -> tuple[Reason, str]:
        if "says" not in said:
            return "failed", raised(said)
        returned = "an object of its own"
        try:
            got = plain(said["says"])
            returned = brief(got)
            if any(self._rules.same_value(got, expected) for expected in results):
                return "", ""
        except (NotPlain, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            pass
        return "wrong_answer", f"returned {returned}, expected {' or '.join(map(brief, results))}"

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
        self._tally.take(said, f"the {'program' if turn is program else 'test'} {turn.why}")
        return False

    def _takes(self, said: dict[str, Any]) -> bool:
        """Take what tests say of themselves; return whether they will say more."""
        match said:
            case {"broken": why}:
                raise CannotScore(f"the tests of the row cannot run: {why}")
            case {"total": int(total)}:
                self._tally.total = total
            case {"passed": bool(passed)}:
                self._tally.take("" if passed else "failed", str(said.get("how") or ""))
            case _:  # They are over, and those that are missing did not run.
                self._tally.take("failed", f"the tests ended. {said.get('over') or ''}")
                return False
        return True


class Jailed:
    """A process of ours in a jail."""

    def __init__(self, worker: WorkerProcess, target: Target) -> None:
        self._worker, self._target = worker, target
        self.why = ""
        """How it ended."""

    async def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any] | Reason:
        """Return what it says, or why it says nothing more."""
        limit_s = max(limit_s, 0.001)
        asked = question | {"limit_s": limit_s}
        said = await self._worker.ask(self._target, asked, limit_s + LATE_S, lambda value: value)
        if isinstance(said, Timeout) or (isinstance(said, dict) and "late" in said):
            place = said.get("late") if isinstance(said, dict) else ""
            self.why = f"took longer than {limit_s:.3g} s" + (f", at {place}" if place else "")
            return "timed_out"
        self.why = said.message if isinstance(said, Failure) else "said something else"
        return said if isinstance(said, dict) else "failed"


def _called(test: Call) -> dict[str, Any]:
    pack = Peer().pack
    arguments = [test.function, *map(pack, test.arguments)]
    return {"operation": "named", "of": ROOT, "arguments": arguments, "keywords": pack(test.keywords)}


def _of_command(said: dict[str, Any]) -> tuple[Reason, str]:
    """Return why a command failed, whatever it printed."""
    if said.get("output", "") is None:
        return "too_much_output", ""
    if said.get("status") == 0:
        return "", ""
    lines = (_text(said, "errors") or "").split("\n")
    places = PLACE.findall("\n".join(lines))
    last = next((line for line in reversed(lines) if line.strip()), "")
    at = f", line {places[-1]}" if places else ""
    return "failed", f"ended with status {said.get('status')}{at}" + (f": {last}" if last else "")


def _text(said: dict[str, Any], name: str) -> str | None:
    """Return what a command printed; None where the process says something else."""
    try:
        return b64decode(said[name]).decode(errors="replace")
    except (KeyError, ValueError, TypeError):
        return None


def raised(said: dict[str, Any]) -> str:
    """Say which exception a program raised, and where."""
    names, at = said.get("raised"), said.get("at")
    kind = names[0] if isinstance(names, list) and names else "something"
    return f"raised {kind}: {said.get('text') or ''}" + (f" ({at})" if at else "")


def shown(text: str) -> str:
    """Return a text of others in one line that is not long, without what a terminal obeys."""
    return visible(" ".join(text[: 4 * LONGEST_TOLD].split())[:LONGEST_TOLD])


def brief(value: Any) -> str:
    """Return a value as Python writes it, cut where it is long."""
    try:
        written = repr(value[:LONGEST_BRIEF] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # digits without end
        return f"a long {type(value).__name__}"
    cut = len(written) > LONGEST_BRIEF or (isinstance(value, str) and len(value) > LONGEST_BRIEF)
    return f"{written[:LONGEST_BRIEF]}..." if cut else written


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
