"""Looks at whole columns of recorded samples, which takes a hundredth of the time of a look at each row.

Invariants: columns pass only where every row in them would pass by itself. A doubt is no refusal: the rows are looked
at one by one then, which names the one that is bad. pyarrow is there, because it read the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flotilla_core.json_text import finite_json

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("group_id", "prompt", "response")
OTHER_TEXTS = ("answer", "ending", "messages", "tokenizer")
JSON = {"info": dict, "chat": list, "answer_column": dict}
LISTS = {"reward_terms": "iuf", "turn_rewards": "iuf", "turn_ends": "iu", "turn_states": "iu"}
MOST = np.iinfo(np.int32).max

Numbers = npt.NDArray[Any]


class Doubt(Exception):
    """A row of the columns may be none that can be trained."""


class Lists(NamedTuple):
    """A column of lists: the length of each, and all of their values."""

    sizes: npt.NDArray[np.int64]
    values: Numbers


class Columns:
    """Some rows, by their columns; a column that is missing, or has other values than asked for, is a doubt."""

    def __init__(self, names: Iterable[str], columns: Iterable[pa.Array], rows: int) -> None:
        import pyarrow as pa

        self._columns = {
            name: column
            for name, column in zip(names, columns, strict=True)
            if not pa.types.is_null(column.type)
        }
        self._rows = rows

    def there(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which rows have a value in a column."""
        column = self._columns.get(name)
        if column is None:
            return np.zeros(self._rows, np.bool_)
        return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))

    def equals(self, name: str, value: object) -> bool:
        """Return whether no row has another value in a column; rows without one do not count."""
        column = self._columns.get(name)
        return column is None or set(column.unique().to_pylist()) <= {None, value}

    def numbers(self, name: str, kinds: str = "iuf", *, needed: bool = True) -> Numbers:
        """Return the numbers of a column, of the rows that have one."""
        column = self._columns.get(name)
        if column is None:
            _require(not needed)
            return np.zeros(0)
        found = column.drop_null().to_numpy(zero_copy_only=False)
        _require(found.dtype.kind in kinds and np.isfinite(found).all())
        _require(not needed or len(found) == self._rows)
        return np.asarray(found)

    def lists(self, name: str, kinds: str, *, needed: bool = True) -> Lists:
        """Return a column of lists; a row without one has an empty list."""
        column = self._columns.get(name)
        if column is None:
            _require(not needed)
            return Lists(np.zeros(self._rows, np.int64), np.zeros(0))
        sizes, flat = self.sizes(column, needed=needed), column.flatten()
        _require(flat.null_count == 0)
        values = flat.to_numpy(zero_copy_only=False)
        _require(values.dtype.kind in kinds)
        return Lists(sizes, values)

    def texts(self, name: str, *, needed: bool = True) -> pa.Array:
        """Return a column of texts."""
        import pyarrow as pa

        column = self._columns.get(name)
        if column is None:
            _require(not needed)
            return pa.array([], pa.string())
        _require(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))
        _require(not needed or column.null_count == 0)
        return column

    @staticmethod
    def sizes(column: pa.Array, *, needed: bool = True) -> npt.NDArray[np.int64]:
        """Return the length of each list; 0 where there is none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        _require(pa.types.is_list(column.type) or pa.types.is_large_list(column.type))
        _require(not needed or column.null_count == 0)
        return np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


class SampleColumns(Columns):
    """The columns of recorded samples, which can be trained as far as one sample tells."""

    def __init__(self, piece: pa.RecordBatch) -> None:
        super().__init__(piece.schema.names, piece.columns, piece.num_rows)
        for name in TEXTS:
            self.texts(name)
        self.groups: list[str] = self.texts("group_id").to_pylist()
        """The group of each row."""
        for name in OTHER_TEXTS:
            self.texts(name, needed=False)
        for name, kind in JSON.items():
            for text in self.texts(name, needed=False).unique().to_pylist():
                _require(not text or _is_json(text, kind))
        self.prompts = self.lists("prompt_token_ids", "iu")
        self.tokens = self.lists("token_ids", "iu")
        for one in (self.prompts, self.tokens):
            _require_tokens(one.values)
        logprobs = self.lists("logprobs", "iuf")
        _require(np.array_equal(logprobs.sizes, self.tokens.sizes))
        _require(np.isfinite(logprobs.values.astype(np.float32)).all())
        trained, there = self.lists("trained", "b", needed=False), self.there("trained")
        _require(np.array_equal(trained.sizes[there], self.tokens.sizes[there]))
        self.numbers("reward")
        self.numbers("greedy_reward", needed=False)
        self.numbers("turns", "iu", needed=False)
        for name, kinds in LISTS.items():
            self.lists(name, kinds, needed=False)
        self.longest = self._longest()
        """The tokens of the longest sequence: a prompt with what follows it, or a branch."""

    def prompt_bytes(self) -> list[bytes]:
        """Return the tokens of each prompt."""
        content = self.prompts.values.astype(np.int32).tobytes()
        ends = np.cumsum(self.prompts.sizes * 4).tolist()
        return [content[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _longest(self) -> int:
        import pyarrow as pa

        whole = self.prompts.sizes + self.tokens.sizes
        column = self._columns.get("branches")
        if column is None:
            return int(whole.max(initial=0))
        sizes, flat = self.sizes(column, needed=False), column.flatten()
        if not len(flat):
            return int(whole.max(initial=0))
        own = sizes > 0
        endings = self._columns.get("ending")
        _require(endings is not None and all(endings.filter(pa.array(own)).to_pylist()))
        _require(pa.types.is_struct(flat.type) and flat.null_count == 0)
        fields = range(flat.type.num_fields)
        of_branches = Columns([flat.type.field(at).name for at in fields], map(flat.field, fields), len(flat))
        starts = of_branches.numbers("start", "iu").astype(np.int64)
        prompts = of_branches.lists("prompt_token_ids", "iu")
        _require_tokens(prompts.values)
        first, last = (np.cumsum(sizes) - sizes)[own], (np.cumsum(sizes) - 1)[own]
        ends = np.append(starts[1:], 0)
        ends[last] = self.tokens.sizes[own]
        _require(not starts[first].any() and (ends >= starts).all())
        return int(max(whole[~own].max(initial=0), (prompts.sizes + ends - starts).max()))


def _require_tokens(values: Numbers) -> None:
    _require(not values.size or 0 <= values.min() <= values.max() <= MOST)


def _is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(finite_json(text), kind)
    except (TypeError, ValueError, RecursionError):
        return False


def _require(shown: object) -> None:
    if not shown:
        raise Doubt
