"""Notice a rank that died, fell silent or makes no progress, and report it with all evidence.

Invariants: a stopped or hung process is found within `rank_timeout_s` and named, not the ranks that wait for it; a
command in which no rank makes progress within its limit fails too, and every layer and every chunk of tokens that a
rank computes is progress; a front that was itself delayed blames no rank. A report is one line for a terminal: stacks
and logs stay in the files that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from flotilla_core.errors import RankFailed
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.rank_process import RankProcess

POLL_S = 0.1
HELD_UP_S = 1.0


class GangWatch:
    """Watches one gang from its start to its end."""

    def __init__(self, plan: GangPlan, ranks: list[RankProcess]) -> None:
        self._plan = plan
        self._ranks = ranks
        self._command = ""
        self._limit_s = plan.slow_timeout_s
        self._moved_at = time.monotonic()
        self._steps: list[int] = []

    @contextlib.contextmanager
    def command(self, kind: str, limit_s: float) -> Iterator[None]:
        """Expect at least one rank to make progress within every `limit_s` while a command runs."""
        self._command, self._limit_s = kind, limit_s
        self._moved_at = time.monotonic()
        try:
            yield
        finally:
            self._command = ""

    async def failure(self) -> RankFailed:
        """Wait until the gang is lost and return what happened to it."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            if now - checked > HELD_UP_S:
                self._forgive(now)
            checked = now
            if found := self._dead():
                return found
            if silent := self._silent(now):
                return await self._stuck(silent, "does not answer")
            if still := self._without_progress(now):
                return await self._stuck(still, "made no progress")

    def _forgive(self, now: float) -> None:
        """Restart all limits: this process did not run for a while, so it could not receive beats."""
        self._moved_at = now
        for rank in self._ranks:
            rank.last_beat = now

    def _dead(self) -> RankFailed | None:
        dead = sorted((rank for rank in self._ranks if rank.process.ended()), key=lambda rank: rank.ended_at)
        if not dead:
            return None
        first = dead[0]
        return RankFailed(
            f"{first.name} {first.process.ended()}",
            where=self._where(first),
            why=f"its log ends with {first.process.last_log_line()!r}; all of it is in {first.process.log}",
            next_step="The ranks are being restarted; a run continues from its last checkpoint.",
        )

    def _silent(self, now: float) -> list[RankProcess]:
        return [rank for rank in self._ranks if now - rank.last_beat > self._plan.rank_timeout_s]

    def _without_progress(self, now: float) -> list[RankProcess]:
        """Return the ranks that are furthest behind if no rank has made progress for too long."""
        steps = [rank.progress for rank in self._ranks]
        if steps != self._steps:
            self._steps, self._moved_at = steps, now
        if not self._command or now - self._moved_at <= self._limit_s:
            return []
        return [rank for rank in self._ranks if rank.waits_for_answer and rank.progress == min(steps)]

    async def _stuck(self, ranks: list[RankProcess], how: str) -> RankFailed:
        for rank in self._ranks:
            rank.judge()
        limit_s = self._plan.rank_timeout_s if how == "does not answer" else self._limit_s
        key = " (rank_timeout_s)" if limit_s == self._plan.rank_timeout_s else ""
        stopped = await asyncio.gather(*(rank.process.is_stopped() for rank in ranks))
        evidence = ["it was stopped by a signal (SIGSTOP) or a debugger"] if any(stopped) else []
        wrote = await asyncio.gather(
            *(rank.process.stacks(wake=wake) for rank, wake in zip(ranks, stopped, strict=True))
        )
        for rank, text in zip(ranks, wrote, strict=True):
            stacks = f"are in {rank.process.stacks_file}" if text else "are not known: it wrote none"
            evidence.append(f"the stacks of {rank.name} {stacks}")
        return RankFailed(
            f"{' and '.join(rank.name for rank in ranks)} {how} for {limit_s:g} s{key}",
            where="; ".join(self._where(rank) for rank in ranks),
            why="; ".join(evidence),
            next_step="The ranks are being restarted; a run continues from its last checkpoint.",
        )

    def _where(self, rank: RankProcess) -> str:
        command = f"{self._command}: " if self._command else ""
        return f"{self._plan.name}, {command}last seen {rank.phase}"
