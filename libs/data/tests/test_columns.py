"""Whole columns are judged as their rows are, one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flotilla_core.errors import InvalidConfig
from flotilla_data.columns import Columns, Reads, all_usable
from flotilla_data.layouts import read_example

CHAT = [{"role": "user", "content": "1"}]
IMAGE = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image", "text": None}]}]


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        (["1", "2"], True),
        (["1", ""], False),
        (["1", None], False),
        ([CHAT, CHAT], True),
        ([CHAT, []], False),
        ([CHAT, None], False),
        ([1, 2], False),
        ([["user"], ["bot"]], False),
        ([IMAGE, IMAGE], False),
    ],
)
def test_whole_columns_of_prompts_are_judged_as_their_rows_are(values: list[Any], usable: bool) -> None:
    assert judged([{"prompt": value} for value in values]) == (usable, usable)


@pytest.mark.parametrize(
    ("value", "usable"),
    [
        (1, True),
        (2**53, True),
        (2**53 + 1, False),
        (-(2**60), False),
        (0.5, True),
        (None, True),
        (float("nan"), False),
        (float("inf"), False),
        (b"bytes", False),
        ("text", True),
        ([1, 2**60], False),
        ([1.0, float("nan")], False),
        ([[], [1]], True),
        ({"a": {"b": [2**60]}}, False),
        ({"a": {"b": [1]}, "c": None}, True),
    ],
)
def test_whole_columns_are_judged_as_their_rows_are(value: Any, usable: bool) -> None:
    rows = [{"prompt": "1", "other": None}, {"prompt": "1", "other": value}]
    assert judged(rows) == (usable, usable)


def judged(rows: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Return whether the rows are usable, judged by whole columns and one by one."""
    (batch,) = pa.Table.from_pylist(rows).to_batches()
    columns = Columns("prompt", "answer", "chosen", "rejected")
    try:
        for row in batch.to_pylist():
            read_example(row, columns, Reads.prompts, "here")
    except InvalidConfig:
        return all_usable(batch, columns), False
    return all_usable(batch, columns), True
