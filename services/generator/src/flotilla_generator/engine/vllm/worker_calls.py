"""Calls of `WeightWorker`'s methods, on every worker of one vLLM.

Invariants: one call at a time, and none is cut short or given a timeout (a late answer would be taken for the next
one's): a cancelled caller waits for its end; an engine that died ends the call that waits for it, which vLLM does not.
Every call waits for the steps of decoding that run, so the end of a transfer is not asked for: the workers tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from flotilla_core.errors import BY_REASON, FlotillaError, Unavailable, WeightGroupFailed
from flotilla_generator.engine.vllm.end_notices import Answer, EndNotices

PROGRESS_POLL_S = 0.25
"""The greatest age of the count of received buckets, and the delay with which a notice that was lost is noticed."""
HEALTH_POLL_S = 0.5

Answers = list[Answer]


class WorkerCalls:
    """The workers of the vLLM that `llm` gives, or of none while it is not there."""

    def __init__(self, llm: Callable[[], Any]) -> None:
        self._llm = llm
        self._one_call = asyncio.Lock()

    async def ask(self, method: str, *arguments: Any) -> Answers:
        """Return the workers' answers, with any errors that they name."""
        task = asyncio.ensure_future(self._call(method, arguments))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def require(self, method: str, *arguments: Any) -> Answers:
        """Answers without an error."""
        return _without_errors(await self.ask(method, *arguments))

    async def transfer(
        self, method: str, arguments: tuple[Any, ...], progress: Callable[[int], None]
    ) -> Answers:
        """Start a transfer on all workers and wait for its end; leaving early leaves the group."""
        try:
            with EndNotices() as notices:
                workers = len(await self.require(method, notices.ticket, *arguments))
                while True:
                    told = await notices.of_all(workers, PROGRESS_POLL_S)
                    answers = _without_errors(told) if told else await self.require("flotilla_status")
                    progress(min(answer["buckets"] for answer in answers))
                    if not any(answer["busy"] for answer in answers):
                        return answers
        except asyncio.CancelledError:
            await self.drop()
            raise

    async def drop(self) -> None:
        """Have them forget what is staged and leave their group."""
        await self.ask("flotilla_drop", "the replica left the weight group")

    def explained(self, error: Exception) -> Exception:
        """Return the error for what vLLM raised, or for an engine that is gone."""
        llm = self._llm()
        if llm is None or llm.errored:
            return Unavailable(
                "vLLM's engine process died", why=str(error), next_step="the service restarts it"
            )
        return error

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Answers:
        async with self._one_call:
            llm = self._llm()
            try:
                answering = asyncio.ensure_future(llm.collective_rpc(method, args=arguments))
                while not (await asyncio.wait([answering], timeout=HEALTH_POLL_S))[0]:
                    if llm.errored:
                        answering.cancel()
                        raise Unavailable(f"{method} got no answer")
                answers: Answers = answering.result()
            # vLLM has no common base of its errors; they mean that its engine process is gone or beyond use.
            except Exception as error:
                raise self.explained(error) from error
        return answers


def _without_errors(answers: Answers) -> Answers:
    failed = [answer for answer in answers if answer["error"]]
    if failed:
        raise _failure(failed)
    return answers


def _failure(failed: Answers) -> FlotillaError:
    """One error for all: a worker's own fault says more than what the others say of the group that it broke."""
    kinds = [BY_REASON.get(answer.get("reason", 0), WeightGroupFailed) for answer in failed]
    own = [kind for kind in kinds if kind is not WeightGroupFailed]
    return (own or kinds)[0]("; ".join(dict.fromkeys(answer["error"] for answer in failed)))
