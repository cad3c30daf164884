"""Knows which columns of a row hold the prompt and what follows it, and judges whole columns at once.

Invariants: a column that the configuration names and the data set has wins over every known layout. A look at whole
columns only ever spares the judgement of rows that pass it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flotilla_core.config import DataConfig
from flotilla_core.structs import LARGEST_INTEGER, MOST_LEVELS

if TYPE_CHECKING:
    import pyarrow as pa

VERL, ROLL, TRL, OPENAI = "verl", "ROLL", "TRL", "OpenAI"
CHAT, SHAREGPT, ALPACA, TEXT = "chats", "ShareGPT", "Alpaca", "text"
"""The known layouts, by the program or the kind of file that they are of."""
INSTRUCTION = "instruction"
PARTS = ("input", "context")
"""The columns that follow an instruction in the prompt."""
FUNCTIONS = "functions"
"""The column of tools in older files of OpenAI."""
OUTPUTS = ("output", "response")
OF_EXTRA = ("extra_info.question", "extra_info.answer")
"""The columns that `sft` of verl learns in rows that are for rewards too."""
LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is a good one, as in KTO's rows."""


class Reads(StrEnum):
    """Says what an algorithm reads from a row."""

    prompts = "prompts"
    """A prompt, and an answer that rewards compare with."""
    answers = "answers"
    """A prompt, and the answer that the model learns to give (`sft`)."""
    pairs = "pairs"
    """A prompt, a preferred answer and another one."""


@dataclass(frozen=True)
class Columns:
    """The columns of a data set; a dot in a name leads into a nested column."""

    prompt: str
    answer: str
    chosen: str
    rejected: str
    layout: str = ""
    """The layout that was recognised; empty where the configuration's own names fit."""
    tools: str = field(default="tools", repr=False)
    """The column with the functions that the model may call."""

    @classmethod
    def of(cls, config: DataConfig, row: Mapping[str, Any], reads: Reads = Reads.prompts) -> Columns:
        """Return the columns of a data set by one of its rows."""
        columns = cls(config.prompt_field, config.answer_field, config.chosen_field, config.rejected_field)
        own_prompt = columns.prompt != _default("prompt_field")
        free = not own_prompt and row.get(columns.prompt) is None
        if reads is Reads.pairs:
            return columns._of_pairs(row) if free else columns
        if columns.answer != _default("answer_field") or columns.answer in row:
            return columns._of_chats(row) if free else columns
        return columns._with_answers(row, free=free, own_prompt=own_prompt, reads=reads)

    def _with_answers(self, row: Mapping[str, Any], *, free: bool, own_prompt: bool, reads: Reads) -> Columns:
        """Look for a layout whose answer has a name of its own."""
        if verl := self._of_verl(row, taught=free and reads is Reads.answers):
            return verl
        if "ground_truth" in row:
            chat = not own_prompt and row.get("messages") is not None
            prompt = "messages" if chat else self.prompt
            return replace(self, prompt=prompt, answer="ground_truth", layout=ROLL)
        if not own_prompt and not free and row.get("completion") is not None:
            return replace(self, answer="completion", layout=TRL)
        output = next((name for name in OUTPUTS if row.get(name) is not None), "")
        if free and isinstance(row.get(INSTRUCTION), str) and output:
            return replace(self, prompt=INSTRUCTION, answer=output, layout=ALPACA)
        if free or (reads is Reads.answers and not own_prompt):
            return self._of_chats(row)
        return self

    def _of_verl(self, row: Mapping[str, Any], *, taught: bool) -> Columns | None:
        """Look for verl's column with the true answer, or for those of its rows that `sft` learns."""
        model = row.get("reward_model")
        if isinstance(model, dict) and "ground_truth" in model:
            return replace(self, answer="reward_model.ground_truth", layout=VERL)
        if taught and all(isinstance(value_at(row, name), str) for name in OF_EXTRA):
            return replace(self, prompt=OF_EXTRA[0], answer=OF_EXTRA[1], layout=VERL)
        return None

    def _of_chats(self, row: Mapping[str, Any]) -> Columns:
        """Look for a column with whole chats, or with texts."""
        if row.get("messages") is not None:
            return replace(self, prompt="messages", layout=CHAT)
        if row.get("conversations") is not None:
            return replace(self, prompt="conversations", layout=SHAREGPT)
        if isinstance(row.get("text"), str) and self.prompt not in row and not set(LABELS) & set(row):
            return replace(self, prompt="text", layout=TEXT)
        return self

    def _of_pairs(self, row: Mapping[str, Any]) -> Columns:
        """Look for pairs whose prompt has another name, or none: then both answers begin with it."""
        if isinstance(row.get("input"), dict) and row.get("preferred_output") is not None:
            return replace(
                self,
                prompt="input.messages",
                chosen="preferred_output",
                rejected="non_preferred_output",
                tools="input.tools",
                layout=OPENAI,
            )
        if isinstance(row.get(INSTRUCTION), str):
            return replace(self, prompt=INSTRUCTION, layout=ALPACA)
        return self._of_chats(row) if row.get("conversations") is not None else self

    def shown(self, reads: Reads) -> str:
        """Say where the prompt and what follows it are."""
        prompt = f"prompt from {self.prompt!r}"
        if self.layout == TEXT:
            return f"all of {self.prompt!r} is trained"
        if self.layout in (CHAT, SHAREGPT) and reads is not Reads.pairs:
            return f"chats from {self.prompt!r}"
        if reads is Reads.pairs:
            return (
                f"{prompt}, answers from {self.chosen!r} and {self.rejected!r}, as in {self.layout}'s layout"
            )
        return f"{prompt}, answer from {self.answer!r}, as in {self.layout}'s layout"

    def others(self, values: Mapping[str, Any], reads: Reads = Reads.prompts) -> dict[str, Any]:
        """Return the other columns, which are sent to the rewards; nested ones stay whole."""
        read = {self.prompt, self.answer} | ({self.chosen, self.rejected} if reads is Reads.pairs else set())
        return {name: value for name, value in values.items() if name not in read}


def _default(key: str) -> Any:
    return DataConfig.model_fields[key].default


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or of a nested one; None where there is none."""
    if path in values:
        return values[path]
    found: Any = values
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return found


def all_usable(batch: pa.RecordBatch, columns: Columns) -> bool:
    """Return whether whole columns show that each of their rows can be used for its prompt."""
    import pyarrow.compute as pc

    prompts = _column(batch, columns.prompt)
    if (
        prompts is None
        or prompts.null_count
        or columns.layout not in ("", VERL)
        or {columns.tools, FUNCTIONS} & {*batch.schema.names}
    ):
        return False
    if _is_text(prompts.type):
        lengths = pc.binary_length(prompts)
    elif _is_list(prompts.type) and _is_struct(prompts.type.value_type):
        lengths = pc.list_value_length(prompts)
        if not _are_plain_chats(prompts):
            return False
    else:
        return False
    if batch.num_rows and pc.min(lengths).as_py() == 0:
        return False
    names = [name for name in batch.schema.names if name not in (columns.prompt, columns.answer)]
    return all(_fits(batch.column(name), MOST_LEVELS) for name in names)


def _are_plain_chats(prompts: pa.Array) -> bool:
    """Return whether all chats are messages of a role and a text, and none ends with an answer of the assistant."""
    import pyarrow.compute as pc

    messages = prompts.flatten()
    names = {field.name for field in messages.type}
    if messages.null_count or names != {"role", "content"}:
        return False
    if not all(_is_text(field.type) for field in messages.type):
        return False
    lengths = pc.list_value_length(prompts)
    if pc.min(lengths).as_py() == 0:
        return False
    roles = pc.struct_field(messages, "role")
    ends = pc.subtract(pc.cumulative_sum(lengths), 1)
    return not (roles.null_count or pc.any(pc.equal(roles.take(ends), "assistant")).as_py())


def _column(batch: pa.RecordBatch, path: str) -> pa.Array | None:
    """Return a column, or a nested one."""
    import pyarrow as pa

    if path in batch.schema.names:
        return batch.column(path)
    first, *inner = path.split(".")
    if first not in batch.schema.names:
        return None
    found = batch.column(first)
    for part in inner:
        if not pa.types.is_struct(found.type) or (at := found.type.get_field_index(part)) < 0:
            return None
        found = found.flatten()[at]
    return found


def _fits(values: pa.Array, levels: int) -> bool:
    """Return whether the wire can certainly carry every value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind) or _is_text(kind):
        return True
    if levels == MOST_LEVELS and is_sent_as_text(kind):
        return True
    if pa.types.is_floating(kind):
        return bool(pc.all(pc.is_finite(values)).as_py() is not False)
    if pa.types.is_integer(kind):
        found = pc.min_max(values)
        least, most = found["min"].as_py(), found["max"].as_py()
        return least is None or bool(least >= -LARGEST_INTEGER and most <= LARGEST_INTEGER)
    inner = [values.flatten()] if _is_list(kind) else values.flatten() if _is_struct(kind) else []
    return bool(inner) and levels > 0 and all(_fits(one, levels - 1) for one in inner)


def is_sent_as_text(kind: pa.DataType) -> bool:
    """Return whether a column's values become text: times and decimal numbers, which JSON has not."""
    import pyarrow as pa

    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))
