"""Knows which columns of a row hold the prompt and its answers, and whether the row can be used.

Invariants: a column that the configuration names and the data set has wins over every known layout. A row is judged
without a tokenizer, by the same rules whether it comes from a line or from Arrow columns; a look at whole columns only
ever spares the judgement of rows that pass it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.structs import LARGEST_INTEGER, MOST_LEVELS, unfit

if TYPE_CHECKING:
    import pyarrow as pa

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Columns:
    """The columns of a data set; a dot in a name leads into a nested column."""

    prompt: str
    answer: str
    chosen: str
    rejected: str
    layout: str = ""
    """The program whose layout was recognised; empty where the configuration's own names fit."""

    @classmethod
    def of(cls, config: DataConfig, row: Mapping[str, Any]) -> Columns:
        """Return the columns of a data set by one of its rows."""
        columns = cls(config.prompt_field, config.answer_field, config.chosen_field, config.rejected_field)
        if columns.answer != _default("answer_field") or columns.answer in row:
            return columns
        model = row.get("reward_model")
        if isinstance(model, dict) and "ground_truth" in model:
            return replace(columns, answer="reward_model.ground_truth", layout="verl")
        if "ground_truth" not in row:
            return columns
        chat = columns.prompt == _default("prompt_field") and row.get("messages") is not None
        prompt = "messages" if chat else columns.prompt
        return replace(columns, prompt=prompt, answer="ground_truth", layout="ROLL")

    @property
    def shown(self) -> str:
        """Say where the prompt and the answer are."""
        return f"prompt from {self.prompt!r}, answer from {self.answer!r}" + (
            f", as in {self.layout}'s layout" if self.layout else ""
        )

    def prompt_of(self, values: Mapping[str, Any]) -> Any:
        """Return the prompt; ROLL writes chat messages as a text of JSON."""
        prompt = value_at(values, self.prompt)
        if self.layout == "ROLL" and self.prompt == "messages" and isinstance(prompt, str):
            try:
                return json.loads(prompt)
            except ValueError:
                return prompt
        return prompt

    def answer_of(self, values: Mapping[str, Any]) -> str:
        """Return the answer as text; empty where there is none."""
        answer = value_at(values, self.answer)
        return "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)

    def others(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the other columns, which are sent to the rewards; nested ones stay whole."""
        return {name: value for name, value in values.items() if name not in (self.prompt, self.answer)}


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


def require_usable(values: dict[str, Any], columns: Columns, where: str) -> None:
    """Raise the reason why a row has no prompt, or cannot be sent to rewards."""
    prompt = columns.prompt_of(values)
    if prompt is None:
        raise InvalidConfig(
            f"column {columns.prompt!r} is missing",
            where=where,
            why=f"the line has {', '.join(sorted(values)) or 'no columns'}",
            next_step="set data.prompt_field, or evaluation.prompt_field for held-out data",
        )
    if prompt in ("", []):
        raise InvalidConfig("the prompt is empty", where=where)
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise InvalidConfig(
            f"column {columns.prompt!r} is neither text nor a list of chat messages",
            where=where,
            why=f"it is a {type(prompt).__name__}",
        )
    if not isinstance(prompt, str):
        require_text(prompt, where)
    for name, value in columns.others(values).items():
        if problem := unfit(value, f"column {name}"):
            raise InvalidConfig(
                "the line has a value that cannot be sent to a reward", where=where, why=problem
            )


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, list) and all(isinstance(one, dict) and "role" in one for one in prompt)


def require_text(messages: Messages, where: str) -> None:
    """Refuse chat messages that hold something else than text, such as an image."""
    for message in messages:
        for kind in _kinds_of(message.get("content")):
            if kind != "text":
                raise InvalidConfig(
                    "a chat message has a part that is not text",
                    where=where,
                    why=f"it is {kind!r}, and models read text alone",
                    next_step="leave such rows out",
                )


def _kinds_of(content: Any) -> list[str]:
    """Return the types of the parts of a message, or the Python type of what is neither text nor a list of parts."""
    if content is None or isinstance(content, str):
        return ["text"]
    if not isinstance(content, list):
        return [type(content).__name__]
    return [_kind_of(part) for part in content]


def _kind_of(part: Any) -> str:
    """Return the type of a part: by its own word, else by the key that it has in place of text."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, dict):
        return type(part).__name__
    others = (key for key, value in part.items() if key != "text" and value is not None)
    return str(part.get("type") or next(others, "text"))


def as_messages(prompt: Any, config: DataConfig) -> Messages | None:
    """Return the messages of a prompt, with the system prompt of the configuration; None where it is plain text."""
    if isinstance(prompt, str):
        if not config.apply_chat_template and not config.system_prompt:
            return None
        prompt = [{"role": "user", "content": prompt}]
    if config.system_prompt and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
    messages: Messages = prompt
    return messages


def all_usable(batch: pa.RecordBatch, columns: Columns) -> bool:
    """Return whether whole columns show that `require_usable` passes each of their rows."""
    import pyarrow.compute as pc

    prompts = _column(batch, columns.prompt)
    if prompts is None or prompts.null_count or columns.layout == "ROLL":
        return False
    if _is_text(prompts.type):
        lengths = pc.binary_length(prompts)
    elif _is_list(prompts.type) and _is_struct(prompts.type.value_type):
        lengths = pc.list_value_length(prompts)
        messages = prompts.flatten()
        if messages.null_count or messages.type.get_field_index("role") < 0:
            return False
        if (at := messages.type.get_field_index("content")) >= 0 and not _is_text(messages.type[at].type):
            return False
    else:
        return False
    if batch.num_rows and pc.min(lengths).as_py() == 0:
        return False
    names = [name for name in batch.schema.names if name not in (columns.prompt, columns.answer)]
    return all(_fits(batch.column(name), MOST_LEVELS) for name in names)


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
    inner = list(_inner(values))
    return bool(inner) and levels > 0 and all(_fits(one, levels - 1) for one in inner)


def is_sent_as_text(kind: pa.DataType) -> bool:
    """Return whether a column's values become text: times and decimal numbers, which JSON has not."""
    import pyarrow as pa

    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _inner(values: pa.Array) -> Iterator[pa.Array]:
    """Return the columns inside a nested one."""
    if _is_list(values.type):
        yield values.flatten()
    elif _is_struct(values.type):
        yield from values.flatten()


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))
