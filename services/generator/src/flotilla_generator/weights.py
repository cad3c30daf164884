"""The weights of this replica: which version decodes, what is staged, and every rule about changing that.

Invariants: at most one transfer or commit runs at a time; the live version changes only after each staged tensor of
each worker agreed with the sender's digest and the engine proved the live weights; a refused or failed sync leaves the
old version serving, except when applying broke half-way, or what arrived in place of the live weights is not
committed: then the phase is BROKEN and nothing decodes until a whole sync succeeds. Versions and epochs belong to a
run; another run starts from none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from enum import Enum
from typing import Any, TypeVar

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    StaleVersion,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_core.version import Version
from flotilla_generator.engine.base import (
    Applied,
    Engine,
    KvPolicy,
    Verified,
    WeightsHalfWritten,
    WeightsNotLive,
)
from flotilla_generator.staged_weights import StagedWeights, differing, require_whole
from flotilla_weights.manifest import Manifest

T = TypeVar("T")


class Phase(Enum):
    """The state of the sync."""

    IDLE = "idle"
    RECEIVING = "receiving"
    STAGED = "staged"
    COMMITTING = "committing"
    BROKEN = "broken"


class WeightSession:
    """The only way to change an engine's weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._transfer: asyncio.Task[Any] | None = None
        self._manifest: Manifest | None = None
        self._publications = 0
        self._broken = False
        self._live_digests: tuple[int, ...] = ()
        self.run_id = ""
        self.epoch = 0
        self.phase = Phase.IDLE
        self.live: Version | None = None
        self.staged: StagedWeights | None = None
        self.buckets_received = 0
        self.error = ""

    @property
    def buckets_total(self) -> int:
        """Buckets of one publication in the joined group."""
        return 0 if self._manifest is None else self._manifest.messages(first=self._publications <= 1)

    async def adopt(self, run_id: str, version: Version) -> None:
        """Serve the weights that the engine booted with as a version of a run, until others come."""
        async with self._lock:
            await self._engine.tag(version)
            self.run_id, self.live = run_id, version

    async def join(
        self, run_id: str, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest
    ) -> None:
        """Enter a group; a higher epoch replaces the one before."""
        self.require_newer(run_id, group.epoch)
        require_whole(manifest, self._engine.info.required_tensors)
        await self._end_transfer()
        async with self._lock:
            await self._engine.drop()
            if run_id != self.run_id:
                await self._engine.tag(None)
                self.run_id, self.live = run_id, None
            self.epoch, self._manifest, self.error = group.epoch, None, ""
            self._unstage()
            await self._transferring("joining", self._engine.join(group, rank_offset, manifest))
            self._manifest, self._publications = manifest, 0

    def require_newer(self, run_id: str, epoch: int) -> None:
        """Refuse a group that the run has opened before the one that was joined, or that one itself."""
        if run_id == self.run_id and epoch <= self.epoch:
            raise StaleVersion(
                f"weight group epoch {epoch} is not newer than {self.epoch}",
                where=f"run {run_id}",
                next_step="open the next group with a higher epoch",
            )

    async def stage(
        self, run_id: str, epoch: int, version: Version, kv_policy: KvPolicy = KvPolicy.RECOMPUTE
    ) -> StagedWeights:
        """Receive one publication in addition to the live weights, or in their place; `commit` has to follow."""
        manifest = self._require_group(run_id, epoch)
        async with self._lock:
            self._require_group(run_id, epoch)
            self._unstage()
            self.phase, self.buckets_received, self.error = Phase.RECEIVING, 0, ""
            self._publications += 1
            started = time.monotonic()
            try:
                received = await self._transferring(
                    f"receiving version {version}", self._engine.receive(self._heard, kv_policy)
                )
            finally:
                self._rest()
            first = received.worker_digests[0]
            elapsed_s = time.monotonic() - started
            self.staged = StagedWeights(version, manifest, first, elapsed_s, received.in_place)
            for digests in received.worker_digests[1:]:
                if digests != first:
                    raise await self._refused(
                        differing(manifest, digests, first, "workers received different bytes")
                    )
            self._rest()
            return self.staged

    async def commit(
        self,
        run_id: str,
        epoch: int,
        version: Version,
        kv_policy: KvPolicy,
        expected: weights_pb2.WeightDigests,
    ) -> Applied:
        """Make the staged version live, if and only if it is what the sender sent.

        A caller that goes away does not stop it half-way.
        """
        return await _to_its_end(self._commit(run_id, epoch, version, kv_policy, expected))

    async def _commit(
        self,
        run_id: str,
        epoch: int,
        version: Version,
        kv_policy: KvPolicy,
        expected: weights_pb2.WeightDigests,
    ) -> Applied:
        async with self._lock:
            waits = self.staged is not None and self.staged.in_place
            if run_id == self.run_id and self._is_live(version, expected) and not waits:
                return Applied(0.0, 0.0, 0.0)
            self._require_group(run_id, epoch)
            staged = self._require_staged(version)
            if disagreement := staged.disagreement_with(expected):
                raise await self._refused(disagreement)
            self.phase = Phase.COMMITTING
            try:
                applied = await self._engine.apply(version, kv_policy)
            except WeightsNotLive as error:
                self._break(error)
                raise
            except FlotillaError as error:
                self.error = str(error)
                raise
            finally:
                self.staged = None
                self._rest()
            self._broken, self.live, self.error = False, version, ""
            self._live_digests = staged.digests
            self._rest()
            return applied

    async def verify(self, run_id: str, version: Version) -> Verified:
        """Compare the memory that decodes with what the commit of `version`, which is live, put there."""
        return await _to_its_end(self._verify(run_id, version))

    async def _verify(self, run_id: str, version: Version) -> Verified:
        async with self._lock:
            self.require_serving(run_id, version)
            if version != self.live:
                raise StaleVersion(f"version {version} is not live", why=f"version {self.live} is")
            try:
                return await self._engine.verify()
            except WeightsNotLive as error:
                self._break(error)
                self._rest()
                raise

    async def abort(self, run_id: str) -> None:
        """Drop what a run has staged or on its way, and its group; the live weights stay.

        A run that this replica was taken from has nothing here any more.
        """
        if self._concerns(run_id):
            await self._end_transfer()
            async with self._lock:
                if self._concerns(run_id):  # another run may have joined while this one waited
                    await self._give_up()

    def require_serving(self, run_id: str, minimum: Version | None) -> None:
        """Refuse a request that this replica must not serve now."""
        if self._broken:
            raise FailedPrecondition(
                "this replica's weights are broken",
                why=self.error,
                next_step="sync a whole version to it; until then use other replicas",
            )
        if minimum is None:
            return
        if self.live is None or run_id != self.run_id or self.live < minimum:
            holds = (
                f"version {self.live} of run {self.run_id}" if self.live is not None else "its boot weights"
            )
            raise StaleVersion(
                f"version {minimum} of run {run_id or 'none'} is not served here",
                why=f"the replica serves {holds}",
                next_step="sync this replica first",
            )

    def _is_live(self, version: Version, expected: weights_pb2.WeightDigests) -> bool:
        """The number alone is not enough: a trainer that started over may give it to other weights."""
        same = self._live_digests == tuple(expected.tensor_digests)
        return self.live == version and same and not self._broken

    def _concerns(self, run_id: str) -> bool:
        return run_id in ("", self.run_id)

    async def _give_up(self) -> None:
        self._manifest = None
        self._unstage()
        await self._engine.drop()

    def _unstage(self) -> None:
        """Forget what is staged; if it came in place of the live weights, those are no version any more."""
        staged, self.staged = self.staged, None
        if staged is not None and staged.in_place:
            self._break(WeightsHalfWritten(f"version {staged.version} arrived and was not committed"))
        self._rest()

    def _heard(self, buckets: int) -> None:
        self.buckets_received = buckets

    def _break(self, error: FlotillaError) -> None:
        self._broken, self.live, self.error = True, None, str(error)

    def _rest(self) -> None:
        """The phase between calls."""
        if self._broken:
            self.phase = Phase.BROKEN
        else:
            self.phase = Phase.STAGED if self.staged is not None else Phase.IDLE

    async def _transferring(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a transfer that `abort`, a newer epoch or a cancelled caller can end; a failure ends the group."""
        self._transfer = task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise WeightGroupFailed(f"{what} was aborted", where=f"epoch {self.epoch}")
            return task.result()
        # An engine may raise anything; whatever it was, the group is left and the state of the weights is asked for.
        except BaseException as error:
            task.cancel()
            await asyncio.wait([task])
            self._manifest, self.error = None, str(error) or "the call was cancelled"
            broken = None if task.cancelled() else task.exception()
            lost = await asyncio.shield(self._engine.drop())
            if isinstance(broken, WeightsHalfWritten):
                self._break(broken)
            elif lost:
                self._break(WeightsHalfWritten("a version arrived in the live weights and was not committed"))
            raise
        finally:
            self._transfer = None

    async def _end_transfer(self) -> None:
        task = self._transfer
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _require_group(self, run_id: str, epoch: int) -> Manifest:
        if run_id != self.run_id or epoch != self.epoch:
            raise StaleVersion(
                f"epoch {epoch} of run {run_id} is not the group of this replica",
                why=f"it is in epoch {self.epoch} of run {self.run_id or 'none'}",
                next_step="join the group first",
            )
        if self._manifest is None:
            raise FailedPrecondition(
                "this replica is in no weight group",
                why=self.error,
                next_step="join a group with a new epoch",
            )
        return self._manifest

    def _require_staged(self, version: Version) -> StagedWeights:
        if self.staged is None or self.staged.version != version:
            raise FailedPrecondition(
                f"version {version} is not staged",
                why=self.error or f"staged is {self.staged.version if self.staged else 'nothing'}",
                next_step="stage it first",
            )
        if self.live is not None and version < self.live:
            raise StaleVersion(f"version {version} is older than {self.live}, which is live")
        return self.staged

    async def _refused(self, why: str) -> WeightsMismatch:
        staged = self.staged
        in_place = staged is not None and staged.in_place
        served = (
            "nothing decodes here until a version is whole"
            if in_place
            else "the previous version is still served"
        )
        error = WeightsMismatch(
            f"version {staged.version if staged else 'none'} was not applied",
            why=why,
            next_step=f"{served}; publish again",
        )
        self._unstage()
        self.error = str(error)
        if in_place:
            await self._engine.drop()
        return error


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which goes on when the caller goes away."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)
