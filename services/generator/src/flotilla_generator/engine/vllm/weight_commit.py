"""The commit that turns staged weights into the live ones.

Invariants: live weights change only between a pause that keeps running requests and the resume after it (where they
are received in place, the pause begins before the transfer); what was only copied is compared after the resume, and no
sample leaves before, nor any token that wrong weights wrote; after weights that not every worker confirmed nothing
decodes until whole ones are live: what comes meanwhile waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from flotilla_core.errors import FlotillaError, WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.engine.base import Applied, KvPolicy, Verified, WeightsHalfWritten, WeightsNotLive
from flotilla_generator.engine.vllm.decoding import Decoding
from flotilla_generator.engine.vllm.worker_calls import Answers, WorkerCalls

PAUSES = {
    KvPolicy.RECOMPUTE: {"mode": "keep", "clear_cache": True},
    KvPolicy.REUSE: {"mode": "keep", "clear_cache": False},
    KvPolicy.DRAIN: {"mode": "wait", "clear_cache": True},
}


class Commits:
    """Pauses and resumes the vLLM that `llm` gives, and has its workers replace what they decode with."""

    def __init__(self, llm: Callable[[], Any], workers: WorkerCalls, decoding: Decoding) -> None:
        self._llm = llm
        self._workers = workers
        self._decoding = decoding
        self._broken = False
        self._still_since: float | None = None
        """The beginning of a pause in which weights are received in place; the pause ends with their commit."""

    @asynccontextmanager
    async def standing_still(self, kv_policy: KvPolicy) -> AsyncIterator[None]:
        """Pause for a transfer into the live weights, until `apply`; where it breaks off, nothing decodes."""
        try:
            await self._stand_still(KvPolicy.RECOMPUTE if self._broken else kv_policy)
        except BaseException:
            # Not one byte of the weights has changed: what was decoding goes on.
            if not self._broken:
                await self._llm().resume_generation()
            raise
        self._still_since = time.perf_counter()
        try:
            yield
        # vLLM has no common base of its errors, and after any of them the live weights are no version.
        except (Exception, asyncio.CancelledError) as error:
            await self.give_up()
            raise WeightsHalfWritten(
                "the transfer into the live weights broke off",
                why=str(error) or "the call was cancelled",
                next_step="nothing decodes here until the next version is whole; that one repairs it",
            ) from error

    async def give_up(self) -> bool:
        """Decode nothing after weights that were received in place and will not be committed, if there are any.

        Return whether there are.
        """
        lost, self._still_since = self._still_since is not None, None
        if lost:
            await self._decode_nothing()
        return lost

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        """Make what is staged live as `version`."""
        # Nothing runs under broken weights that a drain could wait for.
        await self._stand_still(KvPolicy.RECOMPUTE if self._broken else kv_policy)
        try:
            return await self._apply(version)
        finally:
            self._decoding.release()

    async def _apply(self, version: Version) -> Applied:
        still_since, self._still_since = self._still_since, None
        started, unproved = still_since or time.perf_counter(), False
        try:
            answers = await self._replace(version)
            self._broken = False
            unproved = any(answer["check"] for answer in answers)
            if unproved:
                self._decoding.hold()
        except WeightsNotLive:
            await self._decode_nothing()
            raise
        finally:
            if not self._broken:
                await self._llm().resume_generation()
        resumed = time.perf_counter()
        apply_s = max(answer["apply_s"] for answer in answers)
        # The next step waits for copies that were still queued at the resume.
        queued_s = max(0.0, await self._prove() - apply_s) if unproved else 0.0
        return Applied(
            stall_s=resumed - started + queued_s,
            apply_s=apply_s + queued_s,
            verify_s=max(answer["verify_s"] for answer in answers) + time.perf_counter() - resumed,
        )

    async def verify(self) -> Verified:
        """Compare what decodes with what was committed, on all workers and beside decoding."""
        found = await self._found()
        unchecked = next((one["unchecked"] for one in found if one["unchecked"]), "")
        return Verified(0 if unchecked else min(one["tensors"] for one in found), unchecked)

    async def _found(self) -> Answers:
        """Return what each worker finds in its live memory; raise where that is not what was committed."""
        answers = await self._workers.transfer("flotilla_check", (), lambda _: None)
        found = [answer["live"] for answer in answers]
        faults = {
            f"worker {rank}: {fault}" if len(found) > 1 else fault: None
            for rank, one in enumerate(found)
            for fault in one["faults"]
        }
        if faults:
            self._decoding.retract()
            await self._decode_nothing()
            raise WeightsNotLive(
                "the memory that decodes is not what was committed",
                why="; ".join(faults),
                next_step="sync a whole version to this replica; if it happens again, restart it",
            )
        return found

    async def sleep(self) -> int:
        """Pause, forget all KV, and have the workers give its memory back; return the bytes."""
        await self._stand_still(KvPolicy.RECOMPUTE)
        return sum(answer["freed"] for answer in await self._workers.require("flotilla_sleep"))

    async def wake(self) -> None:
        """Have the workers take the memory of the KV cache again, and resume unless the weights are broken."""
        await self._workers.require("flotilla_wake")
        if not self._broken:
            await self._llm().resume_generation()

    async def tag(self, version: Version | None) -> None:
        """Record which version the weights are from now on, where one is known."""
        self._decoding.switch(version)

    async def _prove(self) -> float:
        """Compare what was copied, while decoding goes on; return the seconds that the GPU copied."""
        try:
            return max(float(one["copies_s"]) for one in await self._found())
        except WeightsNotLive:
            raise
        except FlotillaError as error:
            self._decoding.retract()
            await self._decode_nothing()
            raise WeightsNotLive("the new weights were not compared", why=str(error)) from error

    async def _decode_nothing(self) -> None:
        """End what runs under weights that are wrong; what comes waits until whole ones are live."""
        self._broken = True
        await self._llm().pause_generation(mode="abort", clear_cache=True)

    async def _stand_still(self, kv_policy: KvPolicy) -> None:
        """Pause for a commit; not by the pause of AsyncLLM, which sleeps 20 ms for outputs on their way."""
        await self._llm().engine_core.pause_scheduler_async(**PAUSES[kv_policy])

    async def _replace(self, version: Version) -> list[dict[str, Any]]:
        """Load on all workers; the weights count as untouched only where every worker says so."""
        try:
            answers = await self._workers.ask("flotilla_apply")
            errors = dict.fromkeys(answer["error"] for answer in answers if answer["error"])
            if not errors:
                self._decoding.switch(version)
                return answers
        # Whatever went wrong on the way, the weights of the workers are unknown.
        except Exception as error:
            raise WeightsNotLive("the engine did not confirm the new weights", why=str(error)) from error
        if any(answer.get("broken", True) or not answer["error"] for answer in answers):
            raise WeightsNotLive("; ".join(errors))
        raise WeightsMismatch("the staged weights were not applied", why="; ".join(errors))
