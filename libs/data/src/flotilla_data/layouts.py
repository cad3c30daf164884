"""Reads a row as it is meant: its prompt, and the answer or the two answers that follow it.

Invariants: JSON text of a list or a mapping is never an answer that a model learns. Of a whole chat every turn of the
assistant is learned that the row does not exclude, and an answer that a row calls bad is never learned. A row is read
without a tokenizer, by the same rules whether it comes from a line or from Arrow columns.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.structs import unfit
from flotilla_data.chats import Messages, chat_of, is_empty, loaded, tools_of, trains
from flotilla_data.columns import (
    ALPACA,
    CHAT,
    FUNCTIONS,
    LABELS,
    PARTS,
    SHAREGPT,
    TEXT,
    Columns,
    Reads,
    value_at,
)
from flotilla_data.formats import COLUMNS as FILES_OF_COLUMNS
from flotilla_data.formats import suffixes

Said = str | Messages
"""The content of a prompt or of what follows it: a text as it is, or chat messages for the template."""
HUMAN = "\n\nAssistant:"
"""The text that ends the prompt in pairs of plain dialogues."""
READS = {"": "cat", ".gz": "gzip -dc", ".zst": "zstd -dc"}
"""The command that prints what is in a file, by its compression."""


class Example(NamedTuple):
    """A row as an algorithm reads it."""

    prompt: Said
    """Empty where the row is one text that is learned as a whole."""
    answer: str = ""
    """The answer that rewards compare with; empty where there is none."""
    given: tuple[Said, ...] = ()
    """The answers that follow the prompt in the data: one to learn, or the preferred one and the other."""
    sources: tuple[str, ...] = ()
    """The column of each of them, for messages."""
    tools: list[dict[str, Any]] | None = None


def read_example(values: Mapping[str, Any], columns: Columns, reads: Reads, where: str) -> Example:
    """Return what an algorithm reads from a row; raise the reason why it cannot be used."""
    read = {Reads.pairs: _pair, Reads.answers: _answer_to_learn, Reads.prompts: _prompt}[reads]
    try:
        found = read(values, columns, where)
    except RecursionError:
        raise InvalidConfig("the line is nested too deeply", where=where, next_step=_LEAVE_OUT) from None
    for name, value in columns.others(values, reads).items():
        if problem := unfit(value, f"column {name}"):
            raise InvalidConfig(
                "the line has a value that cannot be sent to a reward", where=where, why=problem
            )
    return found


def as_messages(prompt: Said, config: DataConfig) -> Messages | None:
    """Return the messages of a prompt, with the system prompt of the configuration; None where it is plain text."""
    if isinstance(prompt, str):
        if not prompt or not (config.apply_chat_template or config.system_prompt):
            return None
        prompt = [{"role": "user", "content": prompt}]
    if config.system_prompt and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
    return prompt


def _prompt(values: Mapping[str, Any], columns: Columns, where: str) -> Example:
    """Read a prompt that the model answers itself; of a whole chat its last answer is what rewards compare with."""
    prompt = prompt_in(values, columns, where)
    if columns.layout == TEXT:
        raise InvalidConfig(
            f"column {columns.prompt!r} is running text without prompts",
            where=where,
            next_step="learn it with algorithm.type: sft, or set data.prompt_field to a column with prompts",
        )
    raw = value_at(values, columns.answer)
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return Example(prompt, _compared(raw, where), tools=_tools(values, columns, where))
    if raw is not None:
        raise _ends_with_an_answer(columns, where)
    if len(prompt) == 1:
        raise InvalidConfig("the chat begins with its last answer", where=where, next_step=_LEAVE_OUT)
    return Example(prompt[:-1], prompt[-1]["content"], tools=_tools(values, columns, where))


def _answer_to_learn(values: Mapping[str, Any], columns: Columns, where: str) -> Example:
    """Read a prompt with the answer that follows it, or a whole chat."""
    _require_good(values, columns, where)
    prompt = prompt_in(values, columns, where)
    tools = _tools(values, columns, where)
    if columns.layout == TEXT:
        assert isinstance(prompt, str)
        return Example("", given=(prompt,), sources=(columns.prompt,))
    raw = value_at(values, columns.answer)
    if raw is None and not isinstance(prompt, str):
        return _learned_chat(prompt, tools, columns, where)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise _ends_with_an_answer(columns, where)
    what = f"column {columns.answer!r}"
    if raw is None:
        raise InvalidConfig(
            f"{what} is missing, and there is no answer to learn",
            where=where,
            why=f"the line has {', '.join(sorted(values))}",
            next_step="set data.answer_field to the column with the answers",
        )
    given = _said(raw, what, where)
    if not isinstance(given, str):
        prompt = _as_chat(prompt)
        given = _after(prompt, given)
        require_answer(given, what, where)
    return Example(prompt, text_of(given), (given,), (columns.answer,), tools)


def _learned_chat(
    chat: Messages, tools: list[dict[str, Any]] | None, columns: Columns, where: str
) -> Example:
    """Read a whole chat, whose prompt ends where its first turn begins that is learned."""
    learned = [place for place, message in enumerate(chat) if trains(message)]
    if not learned:
        roles = ", ".join(str(message["role"]) for message in chat)
        raise InvalidConfig(
            f"column {columns.answer!r} is missing, and the chat has no turn of the assistant to learn",
            where=where,
            why=f"it has messages of {roles}",
            next_step="leave such rows out, or set data.answer_field to the column with the answers",
        )
    first = learned[0]
    if not first:
        raise InvalidConfig(
            "the chat begins with an answer of the assistant",
            where=where,
            why="there is no prompt before it",
            next_step='give this message "weight": 0, or leave the row out',
        )
    given = chat[first : learned[-1] + 1]
    require_answer(given, f"column {columns.prompt!r}", where)
    return Example(chat[:first], text_of(given), (given,), (columns.prompt,), tools)


def _pair(values: Mapping[str, Any], columns: Columns, where: str) -> Example:
    """Read a prompt with a preferred answer and another one; without a prompt, both begin with it."""
    answers: list[Said] = []
    for name, key in ((columns.chosen, "chosen_field"), (columns.rejected, "rejected_field")):
        if (raw := value_at(values, name)) is None:
            raise InvalidConfig(
                f"column {name!r} is missing",
                where=where,
                why=f"the line has {', '.join(sorted(values))}",
                next_step=_kept_good(label, where)
                if (label := next((one for one in LABELS if one in values), ""))
                else f"every pair needs both answers; set data.{key} where the column has another name",
            )
        answers.append(_said(raw, f"column {name!r}", where))
    chosen, rejected = answers
    prompt: Said | None = None
    if value_at(values, columns.prompt) is not None:
        prompt = prompt_in(values, columns, where)
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        shared = _shared_messages(chosen, rejected)
        begins = bool(shared) and shared[0]["role"] != "assistant"
        if begins and not isinstance(prompt, list):
            _require_repeated(prompt, shared, columns, where)
            prompt = shared
        elif prompt is not None:
            prompt = _as_chat(prompt)
    elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        others = columns.others(values, Reads.pairs).values()
        # Another text may be the prompt under another name.
        prompt = "" if any(isinstance(one, str) for one in others) else _shared_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        raise InvalidConfig(
            f"column {columns.prompt!r} is missing, and both answers do not begin alike",
            where=where,
            why=f"the line has {', '.join(sorted(values))}",
            next_step="set data.prompt_field to the column with the prompt",
        )
    given = (_after(prompt, chosen), _after(prompt, rejected))
    for one, name in zip(given, (columns.chosen, columns.rejected), strict=True):
        require_answer(one, f"column {name!r}", where)
    names = (columns.chosen, columns.rejected)
    return Example(prompt, text_of(given[0]), given, names, _tools(values, columns, where))


def require_answer(given: Said, what: str, where: str) -> None:
    """Refuse what is not an answer that a model could learn."""
    if isinstance(given, str):
        if not given.strip():
            raise InvalidConfig(f"{what} is an empty answer", where=where)
        return
    roles = [message["role"] for message in given]
    if not given or roles[0] != "assistant" or roles[-1] != "assistant":
        raise InvalidConfig(
            f"{what} does not begin and end with an answer of the assistant after the prompt",
            where=where,
            why=f"after the prompt it has messages of {', '.join(map(str, roles)) or 'no role'}",
            next_step="put what comes before the first answer into the prompt, and leave out what follows the last",
        )
    if not any(map(trains, given)):
        raise InvalidConfig(f"{what} excludes all that could be learned", where=where, next_step=_LEAVE_OUT)
    if any(trains(message) and is_empty(message) for message in given):
        raise InvalidConfig(f"{what} is an empty answer", where=where)


def text_of(given: Said) -> str:
    """Return the text of an answer; of several messages that of the last one."""
    return given if isinstance(given, str) else given[-1]["content"] if given else ""


def prompt_in(values: Mapping[str, Any], columns: Columns, where: str) -> Said:
    """Return the prompt of a row; raise where it has none that a model could read."""
    raw = value_at(values, columns.prompt)
    if raw is None:
        raise InvalidConfig(
            f"column {columns.prompt!r} is missing",
            where=where,
            why=f"the line has {', '.join(sorted(values)) or 'no columns'}",
            next_step="set data.prompt_field, or evaluation.prompt_field for held-out data",
        )
    if columns.prompt in ("messages", "conversations") and isinstance(chat := loaded(raw), list):
        raw = chat  # ROLL writes chats as text of JSON
    if columns.layout == ALPACA and isinstance(raw, str):
        raw = _instruction(raw, values, where)
    if raw in ("", []):
        raise InvalidConfig("the prompt is empty", where=where)
    prompt = raw if isinstance(raw, str) else chat_of(raw, where)
    if prompt is None:
        raise InvalidConfig(
            f"column {columns.prompt!r} is neither text nor a list of chat messages",
            where=where,
            why=f"it is a {type(raw).__name__}",
            next_step="write the prompt as text, or as messages with a role and a content",
        )
    return _with_system(prompt, values) if columns.layout in (ALPACA, CHAT, SHAREGPT) else prompt


def _instruction(instruction: str, values: Mapping[str, Any], where: str) -> str:
    """Join an instruction with what belongs to it."""
    if values.get("history"):
        raise InvalidConfig(
            "the row has turns in a column 'history', which is not read",
            where=where,
            next_step="write the whole chat as a list of messages to a column messages",
        )
    parts = [str(values[name]).strip() for name in PARTS if values.get(name)]
    return "\n\n".join([instruction, *(part for part in parts if part)])


def _with_system(prompt: Said, values: Mapping[str, Any]) -> Said:
    """Put the text of a column `system` before the messages, as these layouts mean it."""
    system = values.get("system")
    if not isinstance(system, str) or not system.strip():
        return prompt
    messages = _as_chat(prompt)
    return messages if messages[0]["role"] == "system" else [{"role": "system", "content": system}, *messages]


def _tools(values: Mapping[str, Any], columns: Columns, where: str) -> list[dict[str, Any]] | None:
    found = value_at(values, columns.tools)
    return tools_of(values.get(FUNCTIONS) if found is None else found, where)


def _said(raw: Any, what: str, where: str) -> Said:
    """Return an answer that is text, a number, or chat messages."""
    if isinstance(raw, str):
        require_answer(raw, what, where)
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return json.dumps(raw)
    messages = chat_of(raw, where)
    if not messages:
        raise InvalidConfig(
            f"{what} is neither text nor a list of chat messages",
            where=where,
            why=f"it is a {type(raw).__name__}",
            next_step="write what the model should answer as text, or as messages with a role and a content",
        )
    return messages


def _compared(raw: Any, where: str) -> str:
    """Return what rewards compare with, as text; of chat messages the text of the last one."""
    if raw is None or isinstance(raw, str):
        return raw or ""
    return text_of(messages) if (messages := chat_of(raw, where)) else json.dumps(raw)


def _as_chat(prompt: Said) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _after(prompt: Said, answer: Said) -> Said:
    """Return the messages of an answer without those of the prompt, where it repeats them."""
    if isinstance(prompt, str) or isinstance(answer, str):
        return answer
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _shared_messages(chosen: Messages, rejected: Messages) -> Messages:
    """Return the messages with which both chats begin; each keeps at least one of its own."""
    most = min(len(chosen), len(rejected)) - 1
    same = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    return chosen[: max(same, 0)]


def _require_repeated(prompt: str | None, shared: Messages, columns: Columns, where: str) -> None:
    """Refuse a prompt of text that is none of the messages with which both chats begin: it would be lost."""
    texts = [message["content"].strip() for message in shared]
    if prompt is None or any(text in prompt or prompt.strip() in text for text in texts if text):
        return
    raise InvalidConfig(
        f"column {columns.prompt!r} is not in the messages with which both answers begin",
        where=where,
        why=f"it is {prompt!r:.100}, and they begin with {texts[0]!r:.100}",
        next_step="leave out one of the two: the column, or the messages before the answers",
    )


def _shared_text(chosen: str, rejected: str) -> str:
    """Return the text with which both answers begin, up to the last whole word or turn."""
    same = takewhile(lambda letters: letters[0] == letters[1], zip(chosen, rejected, strict=False))
    shared = "".join(letter for letter, _ in same)
    if HUMAN in shared:
        return shared[: shared.rindex(HUMAN) + len(HUMAN)]
    last = max((place for place, letter in enumerate(shared) if letter.isspace()), default=0)
    return shared[:last].rstrip()


def _require_good(values: Mapping[str, Any], columns: Columns, where: str) -> None:
    """Refuse an answer that its row calls a bad one, as rows of unpaired preferences do."""
    for name in LABELS:
        label = values.get(name)
        if columns.answer != name and isinstance(label, bool | int | float) and label == 0:
            raise InvalidConfig(
                f"the row calls its answer bad, and sft would learn it: column {name!r} is {label}",
                where=where,
                why="rows with labels are unpaired preferences, from which no algorithm here learns",
                next_step=f"rename the column where it means another thing, or {_kept_good(name, where)}",
            )


def _ends_with_an_answer(columns: Columns, where: str) -> InvalidConfig:
    return InvalidConfig(
        f"the messages of column {columns.prompt!r} end with an answer of the assistant",
        where=where,
        why=f"column {columns.answer!r} has an answer too, and a prompt ends where the model begins to write",
        next_step="leave the last message out, or leave out the other column to learn from the whole chat",
    )


def _kept_good(label: str, where: str) -> str:
    """Return the way to learn from unpaired preferences, with a command that keeps the good ones of this file."""
    file, _, place = where.rpartition(", ")
    suffix, packed = suffixes(Path(file))
    if not file or (suffix in FILES_OF_COLUMNS and suffix != ".parquet"):
        return f"write the rows whose {label!r} is true to a file of their own, and learn them by sft"
    path = shlex.quote(file)
    if suffix == ".parquet":
        code = f'rows = read_table(sys.argv[1]); write_table(rows.filter(rows["{label}"].cast("bool")), "good.parquet")'
        command = (
            f"python3 -c 'import sys; from pyarrow.parquet import read_table, write_table; {code}' {path}"
        )
    else:
        # As bytes, so that neither the locale nor the mark of UTF-8 before the first row matters.
        rows = "json.load(sys.stdin.buffer)"
        rows = rows if place.startswith("row") else "map(json.loads, filter(bytes.strip, sys.stdin.buffer))"
        code = f'[print(json.dumps(row)) for row in {rows} if row.get("{label}")]'
        command = f"{READS[packed]} {path} | python3 -c 'import json, sys; {code}' > good.jsonl"
    return f"keep the good answers and learn them by sft: {command}"


_LEAVE_OUT = "leave such rows out"
