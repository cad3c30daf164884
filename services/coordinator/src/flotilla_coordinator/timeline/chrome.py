"""Writes spans as a Chrome trace (chrome://tracing, Perfetto).

Invariants: the output is valid JSON and a function of the spans alone; it is made in one pass over spans in the order
of their start. Times are microseconds since the first span, by the clock of one host: nothing is estimated or corrected
between clocks. A process of the trace is a service instance. A thread is a slot; spans share it only when they follow
each other or when one is the parent around the other, so nothing overlaps.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flotilla_coordinator.timeline.reader import StoredSpan

CHUNK_BYTES = 256 << 10
_ERROR_STATUS = 2


def chrome_trace(spans: Iterable[StoredSpan]) -> Iterator[bytes]:
    """Return the whole file in chunks of about `CHUNK_BYTES`."""
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    chunk: list[bytes] = []
    size = 0
    for event in _Writer().events(spans):
        piece = separator + event.encode()
        separator = b",\n"
        chunk.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    head = separator if separator.startswith(b"{") else b""
    yield b"".join(chunk) + head + b"\n]}\n"


class _Place(NamedTuple):
    """The place of a span in the trace."""

    pid: int
    tid: int
    start_ns: int
    end_ns: int


class _Slots:
    """The threads of one process: which are free, and which span is innermost on each."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._stacks: list[list[StoredSpan]] = []
        self._slot_of: dict[bytes, int] = {}

    def take(self, span: StoredSpan) -> int:
        """Return the slot of a span; spans must come in the order of their start."""
        while self._busy and self._busy[0][0] <= span.start_ns:
            self._release(heapq.heappop(self._busy)[1])
        slot = self._around(span)
        if slot is None:
            slot = self._new()
            heapq.heappush(self._busy, (span.end_ns, slot))
        self._stacks[slot].append(span)
        self._slot_of[span.span_id] = slot
        return slot

    def _around(self, span: StoredSpan) -> int | None:
        """Return the slot of the parent, where the parent is the innermost span there and encloses this one."""
        slot = self._slot_of.get(span.parent_id) if span.parent_id else None
        if slot is None:
            return None
        stack = self._stacks[slot]
        while len(stack) > 1 and stack[-1].end_ns <= span.start_ns:
            del self._slot_of[stack.pop().span_id]
        innermost = stack[-1]
        encloses = innermost.span_id == span.parent_id and innermost.end_ns >= span.end_ns
        return slot if encloses else None

    def _new(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._stacks.append([])
        return len(self._stacks) - 1

    def _release(self, slot: int) -> None:
        for span in self._stacks[slot]:
            self._slot_of.pop(span.span_id, None)
        self._stacks[slot].clear()
        heapq.heappush(self._free, slot)


class _Writer:
    """Turns spans into trace events, as JSON text."""

    def __init__(self) -> None:
        self._origin_ns: int | None = None
        self._processes: dict[tuple[str, str], tuple[int, _Slots]] = {}
        self._places: dict[bytes, _Place] = {}
        self._waiting: list[tuple[bytes, _Place]] = []
        self._flows = 0

    def events(self, spans: Iterable[StoredSpan]) -> Iterator[str]:
        for span in spans:
            if self._origin_ns is None:
                self._origin_ns = span.start_ns
            key = (span.service, span.instance)
            if key not in self._processes:
                self._processes[key] = (len(self._processes) + 1, _Slots())
                yield from self._process_metadata(span)
            pid, slots = self._processes[key]
            place = _Place(pid, slots.take(span) + 1, span.start_ns, span.end_ns)
            self._places[span.span_id] = place
            yield self._complete(span, place)
            for _, target in span.linked():
                if target in self._places:
                    yield from self._flow(self._places[target], place)
                else:
                    self._waiting.append((target, place))
        for target, place in self._waiting:
            if target in self._places:
                yield from self._flow(self._places[target], place)

    def _process_metadata(self, span: StoredSpan) -> Iterator[str]:
        pid = self._processes[span.service, span.instance][0]
        label = f"{span.instance} ({span.host}, pid {span.pid})"
        for name, value in (("process_name", {"name": span.instance}), ("process_labels", {"labels": label})):
            yield json.dumps({"ph": "M", "name": name, "pid": pid, "tid": 0, "args": value})

    def _complete(self, span: StoredSpan, place: _Place) -> str:
        ids = f'"trace_id":"{span.trace_id.hex()}","span_id":"{span.span_id.hex()}"'
        if span.parent_id:
            ids += f',"parent_id":"{span.parent_id.hex()}"'
        if span.status == _ERROR_STATUS:
            ids += ',"status":"error"'
        rest = "" if span.attributes == "{}" else "," + span.attributes[1:-1]
        return (
            f'{{"ph":"X","name":{json.dumps(span.name)},"cat":{json.dumps(span.service)},"pid":{place.pid},'
            f'"tid":{place.tid},"ts":{self._us(span.start_ns)},"dur":{_decimal(span.end_ns - span.start_ns)},'
            f'"args":{{{ids}{rest}}}}}'
        )

    def _flow(self, source: _Place, target: _Place) -> Iterator[str]:
        """Write an arrow from the linked span, at its end where it ended earlier, to the span that links to it."""
        self._flows += 1
        leaves_ns = max(source.start_ns, min(source.end_ns - 1, target.start_ns))
        common = f'"name":"link","cat":"link","id":{self._flows}'
        yield f'{{"ph":"s",{common},"pid":{source.pid},"tid":{source.tid},"ts":{self._us(leaves_ns)}}}'
        arrives_ns = max(leaves_ns, target.start_ns)
        yield (
            f'{{"ph":"f","bp":"e",{common},"pid":{target.pid},"tid":{target.tid},"ts":{self._us(arrives_ns)}}}'
        )

    def _us(self, time_ns: int) -> str:
        return _decimal(time_ns - (self._origin_ns or 0))


def _decimal(nanoseconds: int) -> str:
    """Write nanoseconds as microseconds, exactly."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
