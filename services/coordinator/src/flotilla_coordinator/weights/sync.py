"""Synchronises weights: every leased generator serves exactly the trainer's version.

Invariants: a replica serves a version only after its digests agreed with the sender's, its live weights were verified
and it confirmed the commit. The live check of a version begins when the replicas serve it, and goes on while they
generate: at most one is under way, and a sync begins only after the check of the one before. A failed member costs its
own eviction and one new epoch, never the run, as long as another one remains or returns within the limit. The group is
formed again only when its membership changes or it broke. No weights pass through this process: the bytes go from
trainer ranks to generator workers.

Replicas that join between two syncs take the served version in a group of the trainer and the newcomers alone, under
the next epoch. Only the work that is awaited continues meanwhile. When it ends, that group is ended too, at the trainer
first, so that no step waits for a joiner. A joiner serves only after its commit and its live check. Each instance is
tried once per version, and its failure costs its own eviction, never the run. A replica that did not succeed is a
member of the next sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from opentelemetry.trace import Span

from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.weights.epochs import Failures, GroupBrokenError, WeightEpochs
from flotilla_coordinator.weights.members import (
    GeneratorReplica,
    Group,
    Member,
    Serving,
    SyncReport,
)
from flotilla_core import telemetry
from flotilla_core.config import WeightSyncConfig
from flotilla_core.errors import FlotillaError, Mismatch, WeightGroupFailed, WeightsMismatch
from flotilla_core.tasks import run_while
from flotilla_core.telemetry import names
from flotilla_core.version import Version

T = TypeVar("T")

MAX_EPOCHS_PER_SYNC = 8
LOOK_AGAIN_S = 0.5


class WeightSync:
    """Brings versions from one trainer to a changing set of generators."""

    def __init__(
        self,
        run_id: str,
        config: WeightSyncConfig,
        *,
        backend: str,
        policy: PolicyTrainer,
        candidates: Callable[[], Awaitable[list[GeneratorReplica]]],
        ready: Callable[[], list[GeneratorReplica]],
        evict: Callable[[GeneratorReplica, FlotillaError], None],
        record: Callable[[SyncReport], None],
        verify: Callable[[SyncReport], Awaitable[dict[str, FlotillaError]]],
        fence: int = 0,
        longest_sample_s: float = 0.0,
        max_staleness: int = 0,
    ) -> None:
        self._run_id = run_id
        self._candidates = candidates
        self._ready = ready
        self._evict = evict
        self._record = record
        self._compare = verify
        self._epochs = WeightEpochs(run_id, config, backend, policy, fence, longest_sample_s, max_staleness)
        self.serving = Serving()
        self._let_go: set[str] = set()
        """Instances that were released for another run since the group was formed."""
        self._joiners = LateJoiners(run_id, self._epochs, self.serving, self._expel, record, self._verify)
        self._group: Group | None = None
        self._moving_to: frozenset[str] = frozenset()
        self.version: Version | None = None
        self._check: asyncio.Task[SyncReport] | None = None
        """The sync whose live check is under way, or was the last."""
        self._checked: Version | None = None
        """The newest version whose live check has passed on all generators that decode with it."""
        self._passed = asyncio.Event()
        self._disowned: set[tuple[str, Version]] = set()
        """Instances, each with the version that it did not decode with although it said so."""

    def disowns(self, instance_ids: Collection[str], versions: Collection[Version]) -> bool:
        """Return whether one of these instances was found to decode with other weights than one of these versions."""
        return any((who, version) in self._disowned for who in instance_ids for version in versions)

    def is_verified(self, version: Version) -> bool:
        """Return whether the live check of `version` or a newer one has passed."""
        return self._checked is not None and self._checked >= version

    async def wait_until_verified(self, version: Version) -> None:
        """Wait until the live check of `version` or a newer one has passed; if none ever does, the run ends."""
        while not self.is_verified(version):
            await self._passed.wait()

    async def publish(self, version: Version) -> SyncReport:
        """Make every reachable generator serve `version`; return when they do, while its live check goes on."""
        await self.settled()
        attributes = {names.RUN_ID: self._run_id, names.POLICY_VERSION: str(version)}
        with telemetry.span(names.RL_SYNC, attributes=attributes) as span:
            served: asyncio.Future[SyncReport] = asyncio.get_running_loop().create_future()
            check = self._check = asyncio.create_task(self._serve_and_check(version, served, span))
            try:
                await asyncio.wait({served, check}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self.end_check()
                raise
            # Without a report it failed before anything was served.
            return served.result() if served.done() else await check

    @property
    def checking(self) -> bool:
        """Return whether the live check of the version that is served is under way."""
        return self._check is not None and not self._check.done()

    async def settled(self) -> None:
        """Wait until the version that is served has passed its live check; raise where it does not."""
        if self._check is not None:
            await asyncio.shield(self._check)

    async def end_check(self) -> None:
        """Give up the live check that is under way, if any."""
        check, self._check = self._check, None
        if check is not None:
            check.cancel()
            await asyncio.gather(check, return_exceptions=True)

    async def _serve_and_check(
        self, version: Version, served: asyncio.Future[SyncReport], span: Span
    ) -> SyncReport:
        """Move `version` to the generators and check it live, in further epochs where the group breaks."""
        broken = GroupBrokenError({})
        if self._checked == version:
            self._checked = None  # others take it now
        for attempt in range(1, MAX_EPOCHS_PER_SYNC + 1):
            try:
                with self._moving():
                    report = await self._publish_once(version, attempt)
                    self.version = version
                    self._record(report)
                    if not served.done():
                        served.set_result(report)
                    await self._verified(report)
            except GroupBrokenError as error:
                broken = error
                if (mismatch := broken.common_mismatch) is not None:
                    raise mismatch from broken
                span.add_event("weight group broken", {"failures": str(broken)})
                self._group = None
                for member, why in await self._epochs.abandon(broken):
                    self._expel(member, why)
                continue
            self._checked = version
            self._passed.set()
            self._passed = asyncio.Event()
            return report
        raise WeightGroupFailed(
            f"no generator took version {version}",
            where=f"run {self._run_id}",
            why=f"the weight group broke {MAX_EPOCHS_PER_SYNC} times in a row, last by {broken}",
            next_step="see `flotilla logs` of the generators named here",
        )

    async def keep_serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs generators, and bring newcomers to the served version meanwhile.

        Where no generator serves it any more, the work waits for them; else they catch up in a group of their own.
        A live check that all members fail ends the work with its error.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                checks = {self._check} if self._check is not None and self.checking else set()
                await asyncio.wait({task, *checks}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                if self._check is not None and self._check.done():
                    self._check.result()
                if not task.done() and self.version is not None and not self.checking:
                    await self._look_after_newcomers(self.version, task)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def moves_weights_to(self, instance_id: str) -> bool:
        """Return whether a group that is at work includes this replica."""
        return instance_id in self._moving_to

    def let_go(self, instance_id: str) -> None:
        """Stop counting a replica that must serve another run; if it returns, it joins again."""
        self.serving.lost(instance_id)
        self._let_go.add(instance_id)

    async def close(self) -> None:
        """End the live check, and release the group on every side."""
        await self.end_check()
        await self._release()

    async def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await self._epochs.release(group, group.members)

    async def _publish_once(self, version: Version, attempt: int) -> SyncReport:
        replicas = self._members_to_be(await self._candidates())
        group = self._group
        if group is None or not group.matches(replicas) or self._let_go & group.instance_ids:
            group = await self._form(replicas)
        report, taken, failures = await self._epochs.move(group, version)
        for held in taken:
            self.serving.took(held)
        for member in group.members:
            if member.name in failures:
                self._expel(member, failures[member.name])
        return replace(report, epochs=attempt)

    async def _verified(self, report: SyncReport) -> None:
        """Run the live check; evict members that hold other weights or cannot answer, and raise where none is left.

        Where all of them hold other weights, another one would too: that ends the run.
        """
        attributes = {names.RUN_ID: self._run_id, names.POLICY_VERSION: str(report.version)}
        with telemetry.span(names.RL_SYNC_CANARY, attributes=attributes):
            failures = await self._verify(report)
        wrong = {name: why for name, why in failures.items() if isinstance(why, WeightsMismatch | Mismatch)}
        self._disowned |= {(m.instance_id, report.version) for m in report.members if m.name in wrong}
        if wrong and len(wrong) == len(report.members):
            raise next(iter(wrong.values()))
        if failures and len(failures) == len(report.members):
            raise GroupBrokenError(failures, self._group)
        for member in report.members:
            if member.name in failures:
                self._expel(member, failures[member.name])

    async def _verify(self, report: SyncReport) -> Failures:
        """Check what the members hold, then what they compute; a member that holds something else computes nothing."""
        failures = await self._epochs.verify_live(report)
        holding = tuple(member for member in report.members if member.name not in failures)
        return failures | (await self._compare(replace(report, members=holding)) if holding else {})

    async def _form(self, replicas: list[GeneratorReplica]) -> Group:
        """Form the group that follows the policy from now on."""
        await self._release()
        self.serving.keep_only({replica.instance_id for replica in replicas})
        self._let_go.clear()
        self._group = await self._epochs.form(replicas)
        return self._group

    async def _look_after_newcomers(self, version: Version, work: asyncio.Task[Any]) -> None:
        ready = self._ready()
        if ready and not any(self.serving.serves(replica.instance_id, version) for replica in ready):
            await self.publish(version)
        elif self._joiners.among(ready, version):
            await run_while(work, self._take_in_newcomers(version))

    async def _take_in_newcomers(self, version: Version) -> None:
        """Move the trainer from the main group into one with the newcomers; the next sync forms one group of all."""
        newcomers = self._joiners.among(await self._candidates(), version)
        if newcomers:
            with self._moving():
                self._members_to_be(newcomers)
                await self._release()
                await self._joiners.catch_up(newcomers, version)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Keep every replica that becomes a member inside the block with this run until its end."""
        try:
            yield
        finally:
            self._moving_to = frozenset()

    def _members_to_be(self, replicas: list[GeneratorReplica]) -> list[GeneratorReplica]:
        self._moving_to = frozenset(replica.instance_id for replica in replicas)
        return replicas

    def _expel(self, member: Member, why: FlotillaError) -> None:
        """Evict a member that no longer serves this run; its health decides when it may join again."""
        self.serving.lost(member.instance_id)
        self._evict(member.replica, why)


class LateJoiners:
    """Brings the served version to replicas that join between two syncs, in a small group of their own."""

    def __init__(
        self,
        run_id: str,
        epochs: WeightEpochs,
        serving: Serving,
        expel: Callable[[Member, FlotillaError], None],
        record: Callable[[SyncReport], None],
        verify: Callable[[SyncReport], Awaitable[dict[str, FlotillaError]]],
    ) -> None:
        self._run_id = run_id
        self._epochs = epochs
        self._serving = serving
        self._expel = expel
        self._record = record
        self._verify = verify
        self._tried: set[tuple[str, Version]] = set()

    def among(self, replicas: list[GeneratorReplica], version: Version) -> list[GeneratorReplica]:
        """Return the replicas that do not serve `version` and have not been tried with it."""
        return [
            replica
            for replica in replicas
            if not self._serving.serves(replica.instance_id, version)
            and (replica.instance_id, version) not in self._tried
        ]

    async def catch_up(self, replicas: list[GeneratorReplica], version: Version) -> None:
        """Take these replicas in where possible; a cancellation frees the trainer before it returns."""
        self._tried = {(who, tried) for who, tried in self._tried if tried == version}
        self._tried |= {(replica.instance_id, version) for replica in replicas}
        attributes = {names.RUN_ID: self._run_id, names.POLICY_VERSION: str(version)}
        with telemetry.span(names.RL_CATCH_UP, attributes=attributes) as span:
            try:
                await self._catch_up(replicas, version)
            except GroupBrokenError as broken:
                span.add_event("weight group broken", {"failures": str(broken)})
                for member, why in await self._epochs.abandon(broken):
                    self._expel(member, why)
            finally:
                try:
                    await self._epochs.close_newest()
                # The next group that opens closes this one, so this is no reason to end the run.
                except FlotillaError as error:
                    span.add_event("weight group not closed", {"why": str(error)})

    async def _catch_up(self, replicas: list[GeneratorReplica], version: Version) -> None:
        group = await self._epochs.form(replicas)
        report, taken, failures = await self._epochs.move(group, version)
        report = replace(report, caught_up=True)
        self._record(report)
        failures |= await self._verify(report)
        for held in taken:
            if held.member.name not in failures:
                self._serving.took(held)
        for member in group.members:
            if member.name in failures:
                self._expel(member, failures[member.name])
