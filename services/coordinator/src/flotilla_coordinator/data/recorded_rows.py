"""Reads rows of recorded samples: each has the sample and its prompt as they were drawn.

Invariants: a row that cannot be trained is refused by its file and row. No token is made from text. What is recorded of
versions is not read: they are those of another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.prompts import Prompt, RecordedBranch, RecordedSample
from flotilla_core.errors import InvalidConfig
from flotilla_core.json_text import finite_json
from flotilla_data.rows import Row

T = TypeVar("T", dict[str, Any], list[Any])
KINDS = {"i": "iu", "f": "iuf", "b": "b"}
"""The kinds of values that a list of tokens, numbers or flags may hold."""
NEXT = "record samples with rollout.record, and name the folder `rollouts` of that run, or its files"


def prompt_of(number: int, rows: Sequence[Row]) -> Prompt:
    """Return a group as a prompt that brings its samples."""
    values = rows[0].values
    return Prompt(
        0,
        number,
        text_of(rows[0], "prompt"),
        _numbers(rows[0], "prompt_token_ids", np.dtype(np.int32)),
        text_of(rows[0], "answer") if values.get("answer") else "",
        _json(rows[0], "info", dict),
        chat=_json(rows[0], "chat", list),
        answer_column=_json(rows[0], "answer_column", dict),
        recorded=tuple(map(_sample, rows)),
    )


def text_of(row: Row, name: str) -> str:
    """Return the text in a column."""
    value = row.values.get(name)
    if not isinstance(value, str):
        raise bad_row(row, f"column {name!r} is {'missing' if value is None else 'no text'}")
    return value


def bad_row(row: Row, why: str) -> InvalidConfig:
    """Make the error for a row that is no sample."""
    return InvalidConfig("the row is no recorded sample", where=row.where, why=why, next_step=NEXT)


def _sample(row: Row) -> RecordedSample:
    """Return the sample of a row; raise the reason why it cannot be trained."""
    values = row.values
    tokens = _numbers(row, "token_ids", np.dtype(np.int32))
    logprobs = _numbers(row, "logprobs", np.dtype(np.float32))
    trained = None if values.get("trained") is None else _numbers(row, "trained", np.dtype(np.bool_))
    for name, column in (("logprobs", logprobs), ("trained", trained)):
        if column is not None and len(column) != len(tokens):
            raise bad_row(row, f"it has {len(tokens)} tokens, and {len(column)} numbers in column {name!r}")
    if not np.isfinite(logprobs).all():
        raise bad_row(row, "a log-probability is not finite")
    reward = _number(row, "reward")
    greedy = None if values.get("greedy_reward") is None else _number(row, "greedy_reward")
    try:
        return RecordedSample(
            token_ids=tokens,
            logprobs=logprobs,
            trained=trained,
            text=text_of(row, "response"),
            reward=reward,
            reward_terms=tuple(map(float, values.get("reward_terms") or ())),
            greedy_reward=greedy,
            truncated=bool(values.get("truncated")),
            ending=values.get("ending") or "",
            turns=int(values.get("turns") or 0),
            turn_rewards=tuple(map(float, values.get("turn_rewards") or ())),
            turn_ends=tuple(map(int, values.get("turn_ends") or ())),
            turn_states=tuple(map(int, values.get("turn_states") or ())),
            messages=values.get("messages") or "",
            branches=_branches(row, len(tokens)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise bad_row(row, f"a column holds values of another kind: {error}") from None


def _branches(row: Row, tokens: int) -> tuple[RecordedBranch, ...]:
    found = [_branch(row, one) for one in row.values.get("branches") or ()]
    starts = [one.start for one in found]
    if found and (starts[0] or starts != sorted(starts) or starts[-1] > tokens):
        raise bad_row(row, f"its branches begin at {starts}, among {tokens} tokens")
    if found and not row.values.get("ending"):
        raise bad_row(row, "it has branches, as an episode alone has, and no ending")
    return tuple(found)


def _branch(row: Row, given: Any) -> RecordedBranch:
    if not isinstance(given, Mapping) or not isinstance(given.get("start"), int):
        raise bad_row(row, "column 'branches' holds no sequences with a start and a prompt")
    prompt = _array(row, "branches", given.get("prompt_token_ids"), np.dtype(np.int32))
    return RecordedBranch(given["start"], prompt)


def _json(row: Row, name: str, kind: type[T]) -> T:
    """Return the value of a column of JSON texts; an empty one where it has none."""
    text = row.values.get(name)
    try:
        value = finite_json(text) if text else kind()
    except (TypeError, ValueError, RecursionError):
        raise bad_row(row, f"column {name!r} is no JSON text") from None
    if not isinstance(value, kind):
        raise bad_row(row, f"column {name!r} is no JSON text of a {kind.__name__}")
    return value


def _number(row: Row, name: str) -> float:
    value = row.values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise bad_row(row, f"column {name!r} is no number")
    return float(value)


def _numbers(row: Row, name: str, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return _array(row, name, row.values.get(name), kind)


def _array(row: Row, name: str, value: object, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if not isinstance(value, list):
        raise bad_row(row, f"column {name!r} is {'missing' if value is None else 'no list'}")
    try:
        raw = np.array(value, None if value else kind)
    except (ValueError, OverflowError):
        raise bad_row(row, f"column {name!r} holds lists or other numbers than it should") from None
    if raw.ndim != 1 or raw.dtype.kind not in KINDS[kind.kind]:
        raise bad_row(row, f"column {name!r} holds other values than it should")
    if kind.kind == "i" and raw.size and not 0 <= raw.min() <= raw.max() <= np.iinfo(kind).max:
        raise bad_row(row, f"column {name!r} holds a number that is no token")
    return raw.astype(kind)
