"""The events of runs, for dashboards and outside subscribers; the coordinator's own files stay the source of truth.

Invariants: `publish` never waits; an event is stored at most once (its id is the message id, and the server
drops repeats); the backlog during an outage is bounded and what falls out of it is counted. Events are stored
in the order of publishing unless the server refuses some for a moment: the sequence inside an event decides.
Stream `runs`, subjects `run.<id>.events`, kept for 7 days and 256 MiB. After its disk was full, a server stores nothing
more in a stream, even when there is room again: such a stream is created again, and waiting events are written to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from flotilla_core.bus.connection import BUS_ERRORS, Bus
from flotilla_core.errors import InvalidRequest
from flotilla_core.telemetry.spans import current_carrier

STREAM = "runs"
MAX_AGE_S = 7 * 24 * 3600.0
MAX_BYTES = 256 << 20
MAX_EVENT_BYTES = 512 << 10
_DUPLICATE_WINDOW_S = 120.0
_MAX_BACKLOG = 10_000
_IN_FLIGHT = 64
_RETRY_S = 1.0
_SILENT_BATCHES = 5
"""The number of batches in a row that a server which answers fails to store before its stream counts as broken."""
_MESSAGE_ID = "Nats-Msg-Id"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    subject: str
    payload: bytes
    headers: dict[str, str]


class EventStream:
    """Publishes the events of runs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.dropped = 0
        self._backlog: deque[_Outgoing] = deque()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._sender: asyncio.Task[None] | None = None
        # The connection on which the stream was last seen to exist.
        self._stream_of = -1
        self._silent = 0

    def publish(self, run_id: str, event_id: str, payload: bytes) -> None:
        """Queue an event; a task sends it. A full backlog drops its oldest event."""
        if len(payload) > MAX_EVENT_BYTES:
            raise InvalidRequest(
                f"event {event_id} has {len(payload)} bytes",
                where=run_id,
                why=f"an event holds {MAX_EVENT_BYTES} at most",
                next_step="keep the data in a file of the run and send its name",
            )
        if len(self._backlog) >= _MAX_BACKLOG:
            self._backlog.popleft()
            self.dropped += 1
        self._backlog.append(
            _Outgoing(_subject(run_id), payload, {_MESSAGE_ID: event_id, **current_carrier()})
        )
        self._drained.clear()
        self._wake.set()
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_backlog(), name="event-stream")

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything published is stored; False where it is not in time."""
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for a while, and end."""
        if self._sender is None:
            return
        if not await self.flush(timeout_s):
            logger.warning("%d events of runs did not reach NATS", len(self._backlog))
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)

    async def _send_backlog(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._backlog:
                batch = [self._backlog.popleft() for _ in range(min(_IN_FLIGHT, len(self._backlog)))]
                generation = self._bus.generation
                if not await self._send(batch):
                    self._backlog.extendleft(reversed(batch))
                    await self._bus.pause(generation, _RETRY_S)
            self._drained.set()

    async def _send(self, batch: list[_Outgoing]) -> bool:
        """Store a batch; after a failure the whole batch goes again, and the server drops what it has."""
        if not self._bus.connected:
            return False
        stream = self._bus.jetstream()
        try:
            if self._stream_of != self._bus.generation:
                await self._ensure_stream()
                self._stream_of = self._bus.generation
        except BUS_ERRORS as error:
            logger.debug("the event stream cannot be made now: %r", error)
            return False
        sending = [
            stream.publish(event.subject, event.payload, headers=dict(event.headers)) for event in batch
        ]
        failures = [
            r for r in await asyncio.gather(*sending, return_exceptions=True) if isinstance(r, BaseException)
        ]
        for failure in failures:
            if not isinstance(failure, BUS_ERRORS):
                raise failure
        if not failures:
            self._silent = 0
            return True
        self._silent = self._silent + 1 if all(isinstance(f, TimeoutError) for f in failures) else 0
        if self._silent >= _SILENT_BATCHES:
            await self._make_anew()
        logger.debug("events did not reach NATS: %r", failures[0])
        return False

    async def _make_anew(self) -> None:
        """Give up a stream that stores nothing; the run directories have what was in it."""
        self._silent = 0
        stream = self._bus.jetstream()
        try:
            await stream.stream_info(STREAM)
            await stream.delete_stream(STREAM)
            self._stream_of = -1
            logger.warning("the event stream in NATS stopped storing events and is created again")
        except BUS_ERRORS as error:
            logger.debug("the event stream cannot be created now: %r", error)

    async def _ensure_stream(self) -> None:
        config = StreamConfig(
            name=STREAM,
            subjects=["run.*.events"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=MAX_AGE_S,
            max_bytes=MAX_BYTES,
            duplicate_window=_DUPLICATE_WINDOW_S,
            num_replicas=self._bus.replicas,
        )
        try:
            await self._bus.jetstream().add_stream(config)
        except BadRequestError:
            # It exists with other bounds, which an operator chose.
            return


def _subject(run_id: str) -> str:
    return f"run.{run_id}.events"
