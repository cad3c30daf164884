"""Reads samples that a run recorded, group by group, as prompts that bring their samples with them.

Invariants: a group is the rows that follow each other with one `group_id`, and has one number; groups are drawn,
ordered and resumed like prompts. Every row is judged before the run starts, and one that cannot be trained refuses the
run by its file and row. No token is made from text. What is recorded of versions is not read: they are those of
another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.prompts import (
    DataSetFacts,
    Prompt,
    PromptFile,
    RecordedBranch,
    RecordedSample,
)
from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.json_text import finite_json
from flotilla_data.formats import no_rows
from flotilla_data.rows import BYTES_AT_ONCE, ROWS_AT_ONCE, Row, Rows, open_rows
from flotilla_data.tokenizer import Tokenizer

T = TypeVar("T", dict[str, Any], list[Any])
KINDS = {"i": "iu", "f": "iuf", "b": "b"}
"""The kinds of values that a list of tokens, numbers or flags may hold."""
NEXT = "record samples with rollout.record, and name the folder `rollouts` of that run, or its files"


@dataclass(frozen=True)
class Conditions:
    """The conditions that recorded samples have to fit."""

    temperature: float
    """The temperature by which the run computes log-probabilities."""
    least_samples: int
    """The fewest samples of a group that the advantage compares."""
    greedy: bool
    """True where the advantage compares with the greedy response."""
    max_prompt_tokens: int
    tokenizer: str
    """The digest of the tokenizer of the run."""


def load_recorded(
    source: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    copies: Path | None,
    *,
    temperature: float,
    least_samples: int,
    greedy: bool,
) -> PromptFile:
    """Read the recorded samples of a data set; `copies` is where files are unpacked to."""
    conditions = Conditions(temperature, least_samples, greedy, config.max_prompt_tokens, tokenizer.digest)
    return open_recorded(source, config.split, copies, conditions)


def open_recorded(
    source: Path, split: str, copies: Path | None = None, conditions: Conditions | None = None
) -> RecordedGroups:
    """Open recorded samples; without `conditions` for another use than training."""
    rows = open_rows(source, split, copies)
    if not len(rows):
        raise no_rows(source)
    digest = "" if conditions is None else conditions.tokenizer
    return RecordedGroups(rows, _judged(rows, conditions), digest)


class RecordedGroups(PromptFile):
    """Recorded groups, which stay in their files until they are drawn."""

    streamed = True

    def __init__(self, rows: Rows, judged: Judged, digest: str) -> None:
        identity = blake2b(f"{rows.digest} recorded {digest}".encode(), digest_size=16).hexdigest()
        super().__init__((), about=DataSetFacts(digests=rows.digests, identity=identity))
        self._source = rows
        self._judged = judged

    @property
    def rows(self) -> int:
        """The number of groups."""
        return len(self._judged.starts) - 1

    @property
    def kept(self) -> int:
        """The number of groups, none of which is left out."""
        return self.rows

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt has."""
        return self._judged.longest_prompt

    def size(self, number: int) -> int:
        """Return the number of samples of a group."""
        return len(self._rows_of(number))

    def read(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return these groups."""
        return [prompt_of(number, rows) for number, rows in self.written(numbers)]

    def written(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[Row]]]:
        """Yield these groups as their rows are written."""
        for part in self.parts(numbers):
            wanted = [row for number in part for row in self._rows_of(number)]
            rows = iter(self._source.read(wanted))
            for number in part:
                yield number, list(islice(rows, self.size(number)))

    def parts(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Divide groups into those whose rows are read together: what holds a row is read whole."""
        part: list[int] = []
        count = nbytes = 0
        for number in numbers:
            rows = self._rows_of(number)
            size = sum(map(self._source.most_bytes, rows))
            if part and (count + len(rows) > ROWS_AT_ONCE or nbytes + size > BYTES_AT_ONCE):
                yield part
                part, count, nbytes = [], 0, 0
            part.append(number)
            count, nbytes = count + len(rows), nbytes + size
        if part:
            yield part

    def _rows_of(self, number: int) -> range:
        first, end = self._judged.starts[number : number + 2].tolist()
        return range(first, end)


def prompt_of(number: int, rows: Sequence[Row]) -> Prompt:
    """Return a group as a prompt that brings its samples."""
    values = rows[0].values
    return Prompt(
        0,
        number,
        _text(rows[0], "prompt"),
        _numbers(rows[0], "prompt_token_ids", np.dtype(np.int32)),
        _text(rows[0], "answer") if values.get("answer") else "",
        _json(rows[0], "info", dict),
        chat=_json(rows[0], "chat", list),
        answer_column=_json(rows[0], "answer_column", dict),
        recorded=tuple(map(_sample, rows)),
    )


@dataclass(frozen=True)
class Judged:
    """The result of a look at every row."""

    starts: npt.NDArray[np.int64]
    """The first row of each group, and the number of all rows."""
    longest_prompt: int


@lru_cache(maxsize=8)
def _judged(rows: Rows, conditions: Conditions | None) -> Judged:
    """Look at every row once while its files do not change: a plan and its run read the same ones."""
    starts: list[int] = []
    longest = 0
    for _, group in groupby(rows.unproven(), key=_group_of):
        own = list(group)
        starts.append(own[0].number)
        prompt = prompt_of(len(starts) - 1, own)
        longest = max(longest, prompt_tokens := len(prompt.token_ids))
        if conditions is not None:
            _require_group(own, prompt_tokens, conditions)
            for row, sample in zip(own, prompt.recorded, strict=True):
                _require_fitting(row, sample, conditions)
    return Judged(np.array([*starts, len(rows)], np.int64), longest)


def _group_of(row: Row) -> str:
    if row.error is not None:
        raise row.error
    return _text(row, "group_id")


def _require_group(rows: Sequence[Row], prompt_tokens: int, conditions: Conditions) -> None:
    if prompt_tokens > conditions.max_prompt_tokens:
        raise InvalidConfig(
            f"the prompt has {prompt_tokens} tokens, more than data.max_prompt_tokens",
            where=rows[0].where,
            next_step=f"set data.max_prompt_tokens to {prompt_tokens} or more",
        )
    if len(rows) < conditions.least_samples:
        raise InvalidConfig(
            f"the group has {len(rows)} sample(s)",
            where=rows[0].where,
            why=f"the algorithm compares {conditions.least_samples} samples of a prompt or more",
            next_step="leave the group out, or take an advantage that compares over the whole batch",
        )


def _require_fitting(row: Row, sample: RecordedSample, conditions: Conditions) -> None:
    drawn_at, of = row.values.get("temperature"), row.values.get("tokenizer")
    if drawn_at is not None and abs(drawn_at - conditions.temperature) > 1e-6:
        raise InvalidConfig(
            f"the sample was drawn at temperature {drawn_at:g}, and the run computes with {conditions.temperature:g}",
            where=row.where,
            next_step=f"set rollout.sampling.temperature to {drawn_at:g}",
        )
    if of and of != conditions.tokenizer:
        raise InvalidConfig(
            "the sample has tokens of another tokenizer than that of the stack's model",
            where=row.where,
            next_step="train it on a stack with the model that drew it, or one of the same tokenizer",
        )
    if conditions.greedy and sample.greedy_reward is None:
        raise InvalidConfig(
            "the sample has no reward of a greedy response to its prompt",
            where=row.where,
            why="the advantage compares with it, and the run that recorded the sample drew none",
            next_step="take another algorithm, such as grpo",
        )


def _sample(row: Row) -> RecordedSample:
    """Return the sample of a row; raise the reason why it cannot be trained."""
    values = row.values
    tokens = _numbers(row, "token_ids", np.dtype(np.int32))
    logprobs = _numbers(row, "logprobs", np.dtype(np.float32))
    trained = None if values.get("trained") is None else _numbers(row, "trained", np.dtype(np.bool_))
    for name, column in (("logprobs", logprobs), ("trained", trained)):
        if column is not None and len(column) != len(tokens):
            raise _bad(row, f"it has {len(tokens)} tokens, and {len(column)} numbers in column {name!r}")
    if not np.isfinite(logprobs).all():
        raise _bad(row, "a log-probability is not finite")
    reward = _number(row, "reward")
    greedy = None if values.get("greedy_reward") is None else _number(row, "greedy_reward")
    try:
        return RecordedSample(
            token_ids=tokens,
            logprobs=logprobs,
            trained=trained,
            text=_text(row, "response"),
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
        raise _bad(row, f"a column holds values of another kind: {error}") from None


def _branches(row: Row, tokens: int) -> tuple[RecordedBranch, ...]:
    found = [_branch(row, one) for one in row.values.get("branches") or ()]
    starts = [one.start for one in found]
    if found and (starts[0] or starts != sorted(starts) or starts[-1] > tokens):
        raise _bad(row, f"its branches begin at {starts}, among {tokens} tokens")
    return tuple(found)


def _branch(row: Row, given: Any) -> RecordedBranch:
    if not isinstance(given, Mapping) or not isinstance(given.get("start"), int):
        raise _bad(row, "column 'branches' holds no sequences with a start and a prompt")
    prompt = _array(row, "branches", given.get("prompt_token_ids"), np.dtype(np.int32))
    return RecordedBranch(given["start"], prompt)


def _json(row: Row, name: str, kind: type[T]) -> T:
    """Return the value of a column of JSON texts; an empty one where it has none."""
    text = row.values.get(name)
    try:
        value = finite_json(text) if text else kind()
    except (TypeError, ValueError, RecursionError):
        raise _bad(row, f"column {name!r} is no JSON text") from None
    if not isinstance(value, kind):
        raise _bad(row, f"column {name!r} is no JSON text of a {kind.__name__}")
    return value


def _text(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str):
        raise _bad(row, f"column {name!r} is {'missing' if value is None else 'no text'}")
    return value


def _number(row: Row, name: str) -> float:
    value = row.values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise _bad(row, f"column {name!r} is no number")
    return float(value)


def _numbers(row: Row, name: str, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return _array(row, name, row.values.get(name), kind)


def _array(row: Row, name: str, value: object, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if not isinstance(value, list):
        raise _bad(row, f"column {name!r} is {'missing' if value is None else 'no list'}")
    try:
        raw = np.array(value, None if value else kind)
    except (ValueError, OverflowError):
        raise _bad(row, f"column {name!r} holds lists or other numbers than it should") from None
    if raw.ndim != 1 or raw.dtype.kind not in KINDS[kind.kind]:
        raise _bad(row, f"column {name!r} holds other values than it should")
    if kind.kind == "i" and raw.size and not 0 <= raw.min() <= raw.max() <= np.iinfo(kind).max:
        raise _bad(row, f"column {name!r} holds a number that is no token")
    return raw.astype(kind)


def _bad(row: Row, why: str) -> InvalidConfig:
    return InvalidConfig("the row is no recorded sample", where=row.where, why=why, next_step=NEXT)
