"""Judges recorded samples before a run trains on them: every row, and the groups that rows make.

Invariants: a row that cannot be trained refuses the run by its file and row. Columns of Parquet are judged as a whole,
and row by row only where they leave a doubt. A group is the rows that follow each other with one `group_id`, all with
one prompt, and no later row has that `group_id` again: advantages compare within a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.data.recorded_columns import Doubt, SampleColumns
from flotilla_coordinator.data.recorded_rows import bad_row, prompt_of, text_of
from flotilla_core.errors import InvalidConfig
from flotilla_data.rows import Row, Rows

if TYPE_CHECKING:
    import pyarrow as pa

SAME_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Conditions:
    """The conditions that recorded samples have to fit."""

    temperature: float
    """The temperature by which the run computes log-probabilities."""
    least_samples: int
    """The fewest samples of a group that the advantage compares; smaller groups are left out."""
    greedy: bool
    """True where the advantage compares with the greedy response."""
    reward_terms: int
    """The terms of a reward that the advantage weighs; 0 where it looks at the total."""
    states: bool
    """True where the advantage compares turns that were asked in one state."""
    max_prompt_tokens: int
    tokenizer: str
    """The digest of the tokenizer of the run."""
    vocabulary: int
    """Its number of tokens."""

    def shown_by(self, columns: SampleColumns) -> bool:
        """Return whether columns show that all of their rows fit."""
        named = columns.equals("tokenizer", self.tokenizer) and columns.there("tokenizer").all()
        drawn_at = columns.numbers("temperature", needed=False)
        terms, states = (
            columns.lists("reward_terms", "iuf", needed=False),
            columns.lists("turn_states", "iu", needed=False),
        )
        return bool(
            named
            and (abs(drawn_at - self.temperature) <= SAME_TEMPERATURE).all()
            and columns.prompts.sizes.max(initial=0) <= self.max_prompt_tokens
            and (not self.greedy or columns.there("greedy_reward").all())
            and (not self.reward_terms or (terms.sizes == self.reward_terms).all())
            and (not self.states or states.sizes.all())
        )

    def require(self, row: Row, prompt: Prompt) -> None:
        """Raise the reason why the sample of a row does not fit."""
        (sample,) = prompt.recorded
        drawn_at, of = row.values.get("temperature"), row.values.get("tokenizer")
        if len(prompt.token_ids) > self.max_prompt_tokens:
            raise InvalidConfig(
                f"the prompt has {len(prompt.token_ids)} tokens, more than data.max_prompt_tokens",
                where=row.where,
                next_step=f"set data.max_prompt_tokens to {len(prompt.token_ids)} or more",
            )
        if drawn_at is not None and abs(drawn_at - self.temperature) > SAME_TEMPERATURE:
            raise InvalidConfig(
                f"the sample was drawn at temperature {drawn_at:g}, and the run computes with {self.temperature:g}",
                where=row.where,
                next_step=f"set rollout.sampling.temperature to {drawn_at:g}",
            )
        read = [prompt.token_ids, sample.token_ids, *(one.prompt_token_ids for one in sample.branches)]
        if of != self.tokenizer and (of or max(one.max(initial=0) for one in read) >= self.vocabulary):
            raise InvalidConfig(
                "the sample has tokens of another tokenizer than that of the stack's model",
                where=row.where,
                next_step="train it on a stack with the model that drew it, or one of the same tokenizer",
            )
        if self.greedy and sample.greedy_reward is None:
            raise InvalidConfig(
                "the sample has no reward of a greedy response to its prompt",
                where=row.where,
                why="the advantage compares with it, and the run that recorded the sample drew none",
                next_step="take another algorithm, such as grpo",
            )
        if self.reward_terms and len(sample.reward_terms) != self.reward_terms:
            raise InvalidConfig(
                f"the sample has {len(sample.reward_terms)} reward_terms, and {self.reward_terms} are weighed",
                where=row.where,
                next_step="give a weight for each term (advantage.weights), or take another algorithm, such as grpo",
            )
        if self.states and not sample.turn_states:
            raise InvalidConfig(
                "the sample has no turn_states",
                where=row.where,
                why="the advantage compares turns that were asked in one state",
                next_step="take another algorithm, such as step_reinforce or grpo",
            )


@dataclass(frozen=True)
class Judged:
    """The result of a look at every row."""

    starts: npt.NDArray[np.int64]
    """The first row of each group, and the number of all rows."""
    longest_prompt: int
    longest_sequence: int
    """The tokens of the longest sequence: a prompt with what follows it."""


@lru_cache(maxsize=8)
def judged(rows: Rows, conditions: Conditions | None) -> Judged:
    """Look at every row once while its files do not change: a plan and its run read the same ones."""
    groups = _Groups(rows)

    def shown(piece: pa.RecordBatch) -> bool:
        try:
            columns = SampleColumns(piece)
            if conditions is not None and not conditions.shown_by(columns):
                return False
        except Doubt:
            return False
        groups.add(columns.groups, columns.prompt_bytes(), columns.longest)
        return True

    for row in rows.unproven(shown):
        if row.error is not None:
            raise row.error
        group, prompt = text_of(row, "group_id"), prompt_of(0, [row])
        if conditions is not None:
            conditions.require(row, prompt)
        groups.add([group], [prompt.token_ids.tobytes()], max(prompt.brought_tokens))
    return groups.judged


class _Groups:
    """The groups of the rows that were judged so far."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._count = self._longest_prompt = self._longest = 0
        self._starts: list[int] = []
        self._known: set[int] = set()
        """What `hash` makes of the names, which takes less room than they do."""
        self._last: tuple[str, bytes] | None = None

    def add(self, groups: Iterable[str], prompts: Iterable[bytes], longest: int) -> None:
        """Add the next rows: the group and the tokens of the prompt of each, and the longest sequence of all."""
        self._longest = max(self._longest, longest)
        for group, prompt in zip(groups, prompts, strict=True):
            if self._last is None or self._last[0] != group:
                self._begin(group, prompt)
            elif self._last[1] != prompt:
                raise self._bad(
                    f"its prompt is another one than that of the row before it, which is of group {group} too"
                )
            self._count += 1

    @property
    def judged(self) -> Judged:
        starts = np.array([*self._starts, self._count], np.int64)
        return Judged(starts, self._longest_prompt // np.dtype(np.int32).itemsize, self._longest)

    def _begin(self, group: str, prompt: bytes) -> None:
        if (name := hash(group)) in self._known:
            raise self._bad(f"rows of group {group} came before, and rows of another group between")
        self._known.add(name)
        self._starts.append(self._count)
        self._longest_prompt = max(self._longest_prompt, len(prompt))
        self._last = group, prompt

    def _bad(self, why: str) -> InvalidConfig:
        (row,) = self._rows.read([self._count])
        return bad_row(row, why)
