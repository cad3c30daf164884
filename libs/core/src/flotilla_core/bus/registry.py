"""The registry of instances: a key-value bucket whose keys live only as long as their owner's heartbeat.

Invariants: the registry is a hint: NATS's own users guard it, and whoever is dialled by it has to show a certificate of
the stack. Health decides, so a loss of NATS changes nothing in any view: known instances stay until they miss their
heartbeat on a connection that works. A view is a whole snapshot, a new one at every change and never without one. The
bucket is in memory; heartbeats fill it again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from google.protobuf.message import DecodeError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from flotilla.common.v1.registration_pb2 import InstanceState, Registration
from flotilla_core.bus.connection import BUS_ERRORS, Bus

BUCKET = "registry"
TTL_S = 15.0
HEARTBEAT_S = 5.0
_MARKER_TTL_S = 60.0
_RETRY_S = 1.0
_TICK_S = 1.0
# Expiry is the server's business; a view drops a silent instance itself only when the server's word is lost.
_PATIENCE = 1.5
# A stranger may write as many keys as it likes.
_MOST_NAMED = 100
_LONGEST_KEY = 100

_NO_BUCKET = (NoStreamResponseError, NotFoundError, ServiceUnavailableError)

logger = logging.getLogger(__name__)


class Registry:
    """Announces this process and watches the others."""

    def __init__(self, bus: Bus, *, ttl_s: float = TTL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._bus = bus
        self._ttl_s = ttl_s
        self._heartbeat_s = heartbeat_s
        self._own: Registration | None = None
        self._due = asyncio.Event()
        self._heartbeat: asyncio.Task[None] | None = None

    async def announce(self, registration: Registration) -> None:
        """Publish this instance and keep it alive; again with other content replaces it. Never fails."""
        own = Registration()
        own.CopyFrom(registration)
        self._own = own
        if self._heartbeat is None:
            await self._beat()
            self._heartbeat = asyncio.create_task(self._keep_alive(), name="registry-heartbeat")
        else:
            self._due.set()

    async def update(self, *, state: InstanceState.ValueType) -> None:
        """Publish another state of this instance."""
        if self._own is None:
            return
        self._own.state = state
        await self._beat()

    async def withdraw(self) -> None:
        """Take this instance out of every view."""
        heartbeat, self._heartbeat = self._heartbeat, None
        own, self._own = self._own, None
        if heartbeat is not None:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
        if own is None or not self._bus.connected:
            return
        try:
            bucket = await self._bucket()
            await bucket.delete(own.instance_id)
        except BUS_ERRORS as error:
            logger.info("%s was not withdrawn and expires instead: %r", own.instance_id, error)

    async def watch(self) -> AsyncGenerator[dict[str, Registration]]:
        """Every view from now on, the current one first, by instance id. Runs until it is closed."""
        view = _View(self._ttl_s)
        shown = False
        while True:
            generation = self._bus.generation
            try:
                watcher = await (await self._bucket()).watchall()
            except BUS_ERRORS as error:
                logger.debug("the registry cannot be watched now: %r", error)
                await self._bus.pause(generation, _RETRY_S)
                continue
            view.opened()
            moved = asyncio.ensure_future(self._bus.reconnected(generation))
            try:
                async for entry in self._entries(watcher, moved, view):
                    changed = view.apply(entry)
                    if view.complete and (changed or not shown):
                        shown = True
                        yield dict(view.instances)
            finally:
                moved.cancel()
                await _stop(watcher)

    async def _entries(
        self, watcher: KeyValue.KeyWatcher, moved: asyncio.Future[int], view: _View
    ) -> AsyncIterator[KeyValue.Entry | None]:
        """Changes as they come; None when the initial ones are through and whenever a while has passed."""
        entry: asyncio.Future[KeyValue.Entry | None] | None = None
        try:
            while not moved.done():
                if entry is None:
                    entry = asyncio.ensure_future(watcher.updates(timeout=None))
                await asyncio.wait((entry, moved), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if entry.done():
                    change = entry.result()
                    entry = None
                    view.complete = view.complete or change is None
                    yield change
                elif self._bus.connected:
                    yield None
                else:
                    view.hold()
        finally:
            if entry is not None:
                entry.cancel()

    async def _keep_alive(self) -> None:
        # Not an endless loop: a cancellation is lost where the answer to a heartbeat comes in the same turn (`wait_for`
        # of Python 3.11, in the client of NATS), and the withdrawal would wait for the next one.
        while self._own is not None:
            generation = self._bus.generation
            moved = asyncio.ensure_future(self._bus.reconnected(generation))
            due = asyncio.ensure_future(self._due.wait())
            try:
                await asyncio.wait(
                    {moved, due}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                moved.cancel()
                due.cancel()
            self._due.clear()
            await self._beat()

    async def _beat(self) -> None:
        """Send one heartbeat; after a failure the next one replaces it, as soon as the connection is back."""
        if self._own is None or not self._bus.connected:
            return
        content = self._own.SerializeToString()
        try:
            try:
                await self._bus.jetstream().publish(f"$KV.{BUCKET}.{self._own.instance_id}", content)
            except _NO_BUCKET:
                bucket = await self._bucket()
                await bucket.put(self._own.instance_id, content)
        except BUS_ERRORS as error:
            logger.debug("a heartbeat did not reach the registry: %r", error)

    async def _bucket(self) -> KeyValue:
        config = KeyValueConfig(
            bucket=BUCKET,
            ttl=self._ttl_s,
            limit_marker_ttl=_MARKER_TTL_S,
            storage=StorageType.MEMORY,
            replicas=self._bus.replicas,
        )
        stream = self._bus.jetstream()
        try:
            return await stream.create_key_value(config)
        except BadRequestError:
            # It exists with another lifetime, which an operator chose.
            return await stream.key_value(BUCKET)


class _View:
    """The instances as one watcher sees them."""

    def __init__(self, ttl_s: float) -> None:
        self.instances: dict[str, Registration] = {}
        self.complete = False
        self._ttl_s = ttl_s
        self._seen: dict[str, float] = {}
        self._trusted_from = 0.0
        self._named: set[str] = set()
        """Keys whose refusal was logged."""

    def opened(self) -> None:
        """A watcher was opened: what was known before gets one lifetime to send its heartbeat again."""
        now = asyncio.get_running_loop().time()
        self._trusted_from = now + self._ttl_s if self.instances else now
        self.hold()

    def hold(self) -> None:
        """Silence so far proves nothing: the connection was away."""
        self._seen = dict.fromkeys(self.instances, asyncio.get_running_loop().time())

    def apply(self, entry: KeyValue.Entry | None) -> bool:
        """Take in a change, or (None) the time that has passed; whether the view differs now."""
        now = asyncio.get_running_loop().time()
        silent = [key for key, seen in self._seen.items() if now >= seen + self._ttl_s * _PATIENCE]
        for key in silent:
            self._remove(key)
        if entry is None:
            return bool(silent)
        return self._apply_entry(entry, now) or bool(silent)

    def _apply_entry(self, entry: KeyValue.Entry, now: float) -> bool:
        if entry.operation == KV_PURGE and now < self._trusted_from:
            return False  # it expired while the server was away, not because its owner is
        if entry.operation in (KV_DEL, KV_PURGE):
            return self._remove(entry.key)
        try:
            registration = Registration.FromString(entry.value or b"")
        except DecodeError:
            registration = Registration()
        if registration.instance_id != entry.key:
            self._name(entry.key)
            return False
        changed = self.instances.get(entry.key) != registration
        self.instances[entry.key] = registration
        self._seen[entry.key] = now
        return changed

    def _name(self, key: str) -> None:
        if key not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(key)
            logger.warning(
                "registration %s is ignored: it is none of this instance, or an older Flotilla wrote it: run the same "
                "release everywhere",
                key[:_LONGEST_KEY],
            )

    def _remove(self, key: str) -> bool:
        self._seen.pop(key, None)
        return self.instances.pop(key, None) is not None


async def _stop(watcher: KeyValue.KeyWatcher) -> None:
    try:
        await watcher.stop()
    except BUS_ERRORS as error:
        logger.debug("a registry watcher did not stop in order: %r", error)
