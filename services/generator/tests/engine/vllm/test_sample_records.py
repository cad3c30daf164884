"""What the engine process notes of samples reaches the service as it was noted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from flotilla_core.version import Version
from flotilla_generator.engine.base import Span
from flotilla_generator.engine.vllm.decoding import LiveVersions
from flotilla_generator.engine.vllm.sample_records import LogprobTable, SampleRecord

ONE, TWO, THREE = (Version(0, step) for step in (1, 2, 3))


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_record_travels_bit_for_bit() -> None:
    values = np.frombuffer(np.arange(1, 2048, dtype=np.int32).tobytes(), np.float32)
    record = SampleRecord(values, 1234.5678901234567, ((1.25, 3), (1e9 + 1 / 3, 2000)), waiting=7)
    again = SampleRecord.read(msgspec.msgpack.decode(msgspec.msgpack.encode(record.written())))
    assert again.logprobs.tobytes() == values.tobytes()
    assert (again.first_token_at, again.resumed, again.waiting) == (
        record.first_token_at,
        record.resumed,
        record.waiting,
    )


def test_a_request_that_vllm_refused_has_a_record_of_nothing() -> None:
    assert SampleRecord.read(None).logprobs.size == 0


def test_each_row_of_the_table_holds_what_was_appended_to_it() -> None:
    table = LogprobTable(2, 8)
    a, b = table.take(), table.take()
    table.append([a, b], floats(1, 2))
    table.append([b], floats(3))
    table.extend(a, floats(4, 5, 6))
    table.append([b, a], floats(7, 8))
    assert table.give_back(a).tolist() == [1, 4, 5, 6, 8]
    again = table.take()
    table.append([again], floats(9))
    assert table.give_back(again).tolist() == [9]
    assert table.give_back(b).tolist() == [2, 3, 7]


def test_the_table_grows_with_what_its_rows_hold() -> None:
    table = LogprobTable(1, 4)
    rows: list[int] = []
    for number in range(4):
        rows.append(table.take())
        table.append(rows, floats(*range(number + 1)))
    rows += [table.take() for _ in range(5)]
    assert sorted(rows) == list(range(9))
    assert [table.give_back(row).tolist() for row in rows[:4]] == [[0, 0, 0, 0], [1, 1, 1], [2, 2], [3]]


def test_a_sample_names_every_version_that_wrote_of_it_and_from_which_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr("flotilla_generator.engine.vllm.decoding.time.monotonic", lambda: next(clock))
    versions = LiveVersions()
    for version in (ONE, TWO, THREE):
        versions.switch(version, needed_from=0.0)

    def spans(first: float | None, *resumed: tuple[float, int]) -> list[Span]:
        return list(versions.spans(SampleRecord(floats(*range(8)), first, resumed), tokens=8))

    assert spans(5.0) == [Span(None, 0, 8)]
    assert spans(5.0, (11.0, 4)) == [Span(None, 0, 4), Span(ONE, 4, 8)]
    assert spans(11.0, (12.0, 3), (13.0, 5)) == [Span(ONE, 0, 8)], "pauses that changed nothing"
    assert spans(11.0, (21.0, 4), (31.0, 4)) == [Span(ONE, 0, 4), Span(THREE, 4, 8)]
    assert spans(21.0, (31.0, 8)) == [Span(TWO, 0, 8)], "it had ended before another version wrote"
    assert spans(None) == []
    versions.switch(None, needed_from=25.0)
    assert spans(25.0, (31.0, 2)) == [Span(TWO, 0, 2), Span(THREE, 2, 8)], "what runs knows its versions"
    assert spans(41.0) == [Span(None, 0, 8)]
    assert len(versions._since) == 3, "what nobody asks about is forgotten"
