"""Runs programs that the policy wrote, each in a jail of its own.

Invariants: a program never runs in the worker of an environment, nor in a process that ran another one. Its jail shows
the folders of Python and of its packages, and no file of the stack's or the user's. Whatever it does, its outcome is a
bounded text for the policy. Without a jail none runs, until the stack says `unsafe`. Runs share the processors fairly.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flotilla_core.errors import InvalidConfig, unicode_text
from flotilla_environment.environment import Program
from flotilla_environment.waits import Waits
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import USERS, Jail
from flotilla_workers.pool import FairShare
from flotilla_workers.process import Failure, Timeout
from flotilla_workers.zygotes import Zygotes, that_forks

LOADER = "flotilla_environment.program:load"
TARGET = Target("builtin", "program")
MOST_OF_ONE_REPLY = 16
LONGEST_TEXT = 16_000
"""More than an honest process says of a program."""
LATE_S = 1.0
"""The time that a program has to say where it is, when its limit has passed."""
MOST_MEMORY_BYTES = 1 << 30


class Programs:
    """The programs of all episodes of a replica; as many run at the same time as it has processors."""

    def __init__(self) -> None:
        self._zygotes = Zygotes()
        # Their users are those of no worker that is likely to live now.
        self._slots = iter(lambda: secrets.randbelow(USERS), None)
        self._processors: FairShare[int] = FairShare()
        for number in os.sched_getaffinity(0):
            self._processors.add(number)
        self._jail: Jail | None = None
        self._looked = asyncio.Lock()

    async def run(
        self, programs: Sequence[Program], jail: Jail, run_id: str, waits: Waits
    ) -> list[tuple[str, bool]]:
        """Return of each program what the policy is told, and whether it failed; one runs after the other."""
        if jail.refusal:
            raise InvalidConfig("programs of the policy cannot run here", why=jail.refusal)
        told = [await self._run(program, jail, run_id, waits) for program in programs[:MOST_OF_ONE_REPLY]]
        too_many = (f"error: at most {MOST_OF_ONE_REPLY} programs run in one turn", True)
        return [*told, *[too_many] * (len(programs) - len(told))]

    async def _run(self, program: Program, jail: Jail, run_id: str, waits: Waits) -> tuple[str, bool]:
        waits.begin()
        async with self._processors.place(run_id):
            waits.end()
            own = await self._own(jail)
            worker = await self._zygotes.worker(own, LOADER, (), self._slots)
            try:
                outcome: Any = await worker.load(TARGET)
                if outcome is None:
                    question = {"code": program.code, "limit_s": program.limit_s}
                    outcome = await worker.ask(TARGET, question, program.limit_s + LATE_S, _read)
            finally:
                await worker.kill()
        if isinstance(outcome, Timeout):
            return f"error: the program took longer than {program.limit_s:g} s", True
        if isinstance(outcome, Failure):
            return "error: the process of the program ended before the program did, or for its memory", True
        text, failed = outcome
        return text, failed

    async def _own(self, jail: Jail) -> Jail:
        """Return the jail of programs: within that of environments, and with less to see."""
        async with self._looked:
            if self._jail is None:
                memory = min(jail.bounds.memory_bytes, MOST_MEMORY_BYTES)
                bounds = replace(jail.bounds, memory_bytes=memory)
                self._jail = await that_forks(replace(jail, bounds=bounds, readable=(), environment=()))
        return self._jail

    async def stop(self) -> None:
        """End what is kept for programs to come."""
        await self._zygotes.stop()


def _read(value: Any) -> tuple[str, bool]:
    """Return what a process says of its program; an honest one says nothing that is refused here."""
    match value:
        case {"text": str(text), "failed": bool(failed)} if len(text) <= LONGEST_TEXT:
            return unicode_text(text), failed
    raise NoAnswer("it is nothing that is said of a program")
