"""The Chrome trace: valid, deterministic, without overlaps, with an arrow for every link."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

from flotilla_coordinator.timeline.chrome import chrome_trace
from flotilla_coordinator.timeline.reader import StoredSpan

Event = dict[str, Any]


def stored(
    number: int,
    start_us: int,
    end_us: int,
    *,
    parent: int = 0,
    instance: str = "generator-0",
    attributes: str = "{}",
    links: tuple[int, ...] = (),
) -> StoredSpan:
    return StoredSpan(
        trace_id=b"t" * 16,
        span_id=number.to_bytes(8),
        parent_id=parent.to_bytes(8) if parent else None,
        name=f'span "{number}"',
        kind=1,
        service=instance.split("-", maxsplit=1)[0],
        instance=instance,
        host="host",
        pid=7,
        start_ns=1_700_000_000_000_000_000 + start_us * 1000,
        end_ns=1_700_000_000_000_000_000 + end_us * 1000,
        status=0,
        attributes=attributes,
        links=b"".join(b"t" * 16 + link.to_bytes(8) for link in links) or None,
    )


def in_order(spans: list[StoredSpan]) -> list[StoredSpan]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))


def events(spans: list[StoredSpan]) -> list[Event]:
    found: list[Event] = json.loads(b"".join(chrome_trace(spans)))["traceEvents"]
    return found


def complete(spans: list[StoredSpan]) -> list[Event]:
    return [event for event in events(spans) if event["ph"] == "X"]


def random_spans(count: int) -> list[StoredSpan]:
    """Concurrent work of several instances: roots with children, some of which outlive their parent."""
    random_source = random.Random(5)
    spans: list[StoredSpan] = []
    while len(spans) < count:
        start = random_source.randrange(count * 20)
        root = len(spans) + 1
        instance = f"generator-{random_source.randrange(4)}"
        spans.append(stored(root, start, start + random_source.randrange(1, 2000), instance=instance))
        for _ in range(random_source.randrange(8)):
            child = start + random_source.randrange(1500)
            end = child + random_source.randrange(800)
            spans.append(stored(len(spans) + 1, child, end, parent=root, instance=instance))
    return in_order(spans[:count])


def test_spans_on_one_thread_follow_each_other_or_nest() -> None:
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in complete(random_spans(5000)):
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        open_ends: list[float] = []
        for event in lane:
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-6
            open_ends.append(event["ts"] + event["dur"])


def test_a_lane_is_free_again_when_its_span_has_ended() -> None:
    one_after_another = [stored(number, number * 10, number * 10 + 10) for number in range(1, 100)]
    assert {event["tid"] for event in complete(one_after_another)} == {1}


def test_a_child_is_drawn_inside_its_parent_and_a_second_one_beside_it() -> None:
    spans = [
        stored(1, 0, 100),
        stored(2, 10, 60, parent=1),
        stored(3, 20, 50, parent=1),
        stored(4, 70, 80, parent=1),
    ]
    assert [event["tid"] for event in complete(spans)] == [1, 1, 2, 1]


def test_each_instance_is_a_process_with_its_name() -> None:
    found = events([stored(1, 0, 10), stored(2, 0, 10, instance="trainer-0")])
    named = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {1: "generator-0", 2: "trainer-0"}
    assert [event["pid"] for event in found if event["ph"] == "X"] == [1, 2]


def test_every_link_is_one_arrow_forward_in_time() -> None:
    spans = in_order(
        [
            stored(1, 0, 10),
            stored(2, 0, 500, instance="generator-1"),
            stored(3, 100, 200, instance="trainer-0", links=(1, 2, 5, 77)),  # 77 is not there
            stored(5, 300, 400),
        ]
    )
    found = events(spans)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 3
    assert all(starts[flow]["ts"] <= ends[flow]["ts"] for flow in starts)
    slices = {(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"}
    for flow in starts.values():
        assert any(
            flow["pid"] == pid and flow["tid"] == tid and begin <= flow["ts"] <= end
            for pid, tid, begin, end in slices
        )


def test_attributes_and_times_survive_exactly() -> None:
    attributes = json.dumps({"flotilla.step": 3, "text": 'quote " and \u2028', "list": [1, 2.5, None]})
    (first, second) = complete([stored(1, 0, 10, attributes=attributes), stored(2, 3, 4, parent=1)])
    assert first["args"]["text"] == 'quote " and \u2028'
    assert first["args"]["list"] == [1, 2.5, None]
    assert (second["ts"], second["dur"]) == (3.0, 1.0)
    assert second["args"]["parent_id"] == first["args"]["span_id"]
    assert first["name"] == 'span "1"'


def test_no_spans_make_a_valid_empty_trace() -> None:
    assert events([]) == []


def test_many_spans_come_in_chunks_the_same_each_time() -> None:
    spans = random_spans(20_000)
    chunks = list(chrome_trace(spans))
    assert len(chunks) > 10
    assert max(len(chunk) for chunk in chunks) < 300 << 10
    assert all(a == b for a, b in zip(chunks, chrome_trace(spans), strict=True))
    assert len(json.loads(b"".join(chunks))["traceEvents"]) >= 20_000
    assert all(a.start_ns <= b.start_ns for a, b in pairwise(spans))
