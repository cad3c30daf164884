"""Makes prompts from the rows of a data set: all before the run starts, or each when it is drawn.

Invariants: both ways make the same prompts, with the same numbers. `index` is the row's place in the data set, with the
rows that are left out counted, and never changes. Every row is judged before the run starts; only what takes the
tokenizer or the chat template waits for the draw where prompts are streamed. Bad rows are named by file and row, and
more of them than `data.max_bad_rows` end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.chat_turns import Chat, prompt_texts
from flotilla_core.config import DataConfig
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.structs import unfit
from flotilla_data.chats import Messages
from flotilla_data.columns import Columns, Reads, all_usable, value_at
from flotilla_data.formats import no_rows
from flotilla_data.layouts import Example, as_messages, read_example
from flotilla_data.rows import ROWS_AT_ONCE, Proof, Row, Rows, open_rows, parts
from flotilla_data.tokenizer import Tokenizer

STREAMED_ABOVE_ROWS = 20_000
"""More rows are streamed unless `data.streaming` says otherwise: they take seconds to tokenize, and much memory."""
STREAMED_ABOVE_BYTES = 32 << 20
"""Rows of more bytes are streamed likewise: what they become in memory can take twenty times as much."""
MOST_LOADED_BYTES = 256 << 20
SHORT_CHARACTERS = 1 << 16
CHARACTERS_PER_TOKEN = 16
"""A text of more characters for each token of the limit, and more than `SHORT_CHARACTERS`, counts as too long."""
NAMED_BAD_ROWS = 5


class Answer(NamedTuple):
    """A given answer, with the token that ends it."""

    text: str
    token_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_] | None = None
    """The tokens that are learned, the others being context; None where all are."""


class RecordedBranch(NamedTuple):
    """A sequence of a recorded episode: its prompt, and where what follows it begins among the tokens."""

    start: int
    prompt_token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class RecordedSample:
    """A sample that a run drew and scored, as its record has it."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    trained: npt.NDArray[np.bool_] | None
    """The tokens that the policy wrote; None where it wrote all."""
    text: str
    reward: float
    reward_terms: tuple[float, ...]
    greedy_reward: float | None
    truncated: bool
    ending: str
    """The end of the episode; empty for a single response."""
    turns: int
    turn_rewards: tuple[float, ...]
    turn_ends: tuple[int, ...]
    turn_states: tuple[int, ...]
    messages: str
    branches: tuple[RecordedBranch, ...]


@dataclass(frozen=True)
class Prompt:
    """One prompt in one epoch."""

    epoch: int
    index: int
    """The prompt's place among all rows of the run, one data set after the other."""
    prompt_text: str
    token_ids: npt.NDArray[np.int32]
    answer: str
    info: dict[str, Any]
    """The row's other columns."""
    given: tuple[Answer, ...] = ()
    """The answers of the data that are learned: of a pair the preferred one and the other; else one, or several where a
    chat needs a sequence for each turn."""
    data_set: str = ""
    """The name of its data set, where the run has several."""
    recorded: tuple[RecordedSample, ...] = ()
    """The samples of the prompt that a run recorded, where the data holds samples."""
    teacher: str = ""
    """The role of the teacher that scores its samples, where its row chooses one."""
    chat: Messages = field(default_factory=list)
    """The messages of the prompt, where it is a chat."""
    answer_column: dict[str, Any] = field(default_factory=dict)
    """The answer as the row has it, under the name of its column."""

    @property
    def brought(self) -> Sequence[Answer | RecordedSample]:
        """Return what is trained and comes with the data: given answers or recorded samples."""
        return self.given or self.recorded

    @property
    def brought_tokens(self) -> Iterator[int]:
        """Return the tokens of each sequence that comes with the data."""
        for one in self.brought:
            branches = one.branches if isinstance(one, RecordedSample) else ()
            ends = [*(branch.start for branch in branches[1:]), len(one.token_ids)]
            prompts = [branch.prompt_token_ids for branch in branches] or [self.token_ids]
            begin = 0
            for prompt, end in zip(prompts, ends, strict=True):
                yield len(prompt) + end - begin
                begin = end


@dataclass
class BadRows:
    """The rows of a data set that cannot be used."""

    source: Path
    total: int
    most: float
    """The share that may be bad."""
    numbers: set[int] = field(default_factory=set)
    named: list[str] = field(default_factory=list)
    """The errors of the first ones, with file and row."""

    def add(self, number: int, error: FlotillaError) -> None:
        """Count a row; raise where it is one too many."""
        if not self.most:
            raise error
        if number in self.numbers:
            return
        self.numbers.add(number)
        if len(self.named) < NAMED_BAD_ROWS:
            self.named.append(str(error))
        if len(self.numbers) > self.most * self.total:
            raise InvalidConfig(
                f"more than {self.most:.3%} of {self.total:,} rows are bad",
                where=str(self.source),
                why="; ".join(self.named),
                next_step="mend them, or raise data.max_bad_rows",
            )


class PromptFile:
    """The prompts of a data set, by row."""

    streamed = False
    """True where prompts are made when they are drawn."""

    def __init__(
        self,
        prompts: Sequence[Prompt | None],
        dropped: int = 0,
        truncated: int = 0,
        *,
        bad: BadRows | None = None,
        about: DataSetFacts | None = None,
    ) -> None:
        self._by_row = prompts
        self._kept = sum(prompt is not None for prompt in prompts)
        self.dropped = dropped
        self.truncated = truncated
        self.bad = bad or BadRows(Path(), len(prompts), 0.0)
        self.about = about or DataSetFacts()

    @property
    def rows(self) -> int:
        """The number of rows, with those that are left out."""
        return len(self._by_row)

    @property
    def kept(self) -> int:
        """The number of prompts."""
        return self._kept

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt can have."""
        return max((len(prompt.token_ids) for prompt in self._by_row if prompt is not None), default=0)

    @property
    def remarks(self) -> Iterator[str]:
        """Say which rows are left out because they are bad, for plans and notices."""
        bad = self.bad
        if bad.numbers:
            yield (
                f"{len(bad.numbers):,} of {bad.total:,} rows of {bad.source} are bad and left out "
                f"(data.max_bad_rows is {bad.most:g}): {'; '.join(bad.named)}"
            )

    @property
    def longest_brought(self) -> int:
        """The tokens of the longest sequence that comes with the data: a prompt with what follows it."""
        return max(tokens for chunk in self.chunks() for prompt in chunk for tokens in prompt.brought_tokens)

    def read(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return the prompts of these rows; None for those that are left out."""
        return [self._by_row[number] for number in numbers]

    def chunks(self, most: int = ROWS_AT_ONCE) -> Iterator[list[Prompt]]:
        """Return all prompts in the order of the rows, at most so many at a time."""
        for start in range(0, self.rows, most):
            for part in self.parts(range(start, min(start + most, self.rows))):
                yield [prompt for prompt in self.read(part) if prompt is not None]

    def parts(self, numbers: Sequence[int]) -> Iterable[Sequence[int]]:
        """Divide rows into those that are read together."""
        return [numbers]

    def first(self, most: int) -> list[Prompt]:
        """Return the first prompts, at most this many."""
        found: list[Prompt] = []
        for chunk in self.chunks(max(64, min(most, ROWS_AT_ONCE))):
            found += chunk
            if len(found) >= most:
                break
        return found[:most]

    def cut(self, most: int) -> PromptFile:
        """Return the first prompts alone, at most this many."""
        return PromptFile(self.first(most), bad=self.bad, about=self.about)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts in the order of the rows."""
        return [prompt for chunk in self.chunks() for prompt in chunk]


class StreamedPrompts(PromptFile):
    """The prompts of a data set that stay in its files until they are drawn."""

    streamed = True

    def __init__(self, rows: Rows, maker: PromptMaker, bad: BadRows, about: DataSetFacts) -> None:
        super().__init__((), bad=bad, about=about)
        self._rows = rows
        self._maker = maker
        self._long: set[int] = set()

    @property
    def rows(self) -> int:
        """The number of rows, with those that are left out."""
        return len(self._rows)

    @property
    def kept(self) -> int:
        """The number of prompts, as far as it is known: one may turn out too long when it is drawn."""
        return self.rows - self.dropped - len(self.bad.numbers)

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt can have: nobody has counted them."""
        return self._maker.config.max_prompt_tokens

    def read(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Make the prompts of these rows; None for those that are left out."""
        made = [one for part in self.parts(numbers) for one in self._maker.make(self._rows.read(part))]
        for one in made:
            if isinstance(one, LeftOut) and one.error is not None:
                self.bad.add(one.number, one.error)
            elif (isinstance(one, LeftOut) or one.was_long) and one.number not in self._long:
                self._long.add(one.number)
                self.dropped += isinstance(one, LeftOut)
                self.truncated += not isinstance(one, LeftOut)
        return [None if isinstance(one, LeftOut) else one.prompt for one in made]

    def parts(self, numbers: Sequence[int]) -> Iterable[Sequence[int]]:
        """Divide rows into those that are read together."""
        return parts(self._rows, numbers)


@dataclass(frozen=True)
class DataSetFacts:
    """Facts of a data set beside its prompts."""

    columns: Columns | None = None
    digests: dict[str, str] = field(default_factory=dict)
    """The digest of the content of each file."""
    identity: str = ""
    """The digest of all that its prompts are made of: content, columns, settings and tokenizer."""
    order: npt.NDArray[np.int64] | None = None
    """The rows by ascending difficulty, where the configuration names its column."""


class LeftOut(NamedTuple):
    """A row without a prompt."""

    number: int
    error: FlotillaError | None
    """The reason why it is bad; None where its prompt is too long."""


class Made(NamedTuple):
    """A prompt, with the place of its row for messages."""

    prompt: Prompt
    where: str
    values: dict[str, Any]
    """The whole row."""
    example: Example
    """The example that was read from it."""
    uncut: list[int]
    """The tokens of the prompt before the limit."""
    was_long: bool = False

    @property
    def number(self) -> int:
        """The number of its row."""
        return self.prompt.index


class Stage(Protocol):
    """Adds to a prompt what an algorithm needs beside it."""

    def require(self, values: dict[str, Any], columns: Columns, where: str) -> None:
        """Raise the reason why a row cannot be used."""
        ...

    def finish(self, made: list[Made], columns: Columns) -> list[Made | LeftOut]:
        """Return the prompts with what was added, and the rows that turned out bad."""
        ...


class PromptText(NamedTuple):
    """The text of a prompt before it is tokenized."""

    text: str
    bare: bool = False
    """True where it has no special tokens yet."""
    was_long: bool = False
    """True where it is the end of a text that cannot be within the limit."""


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of rows."""

    columns: Columns
    config: DataConfig
    tokenizer: Tokenizer
    reads: Reads = Reads.prompts
    stages: Sequence[Stage] = ()

    def read(self, row: Row) -> Example:
        """Return what a row holds; raise the reason why it cannot be used."""
        if row.error is not None:
            raise row.error
        example = read_example(row.values, self.columns, self.reads, row.where)
        for stage in self.stages:
            stage.require(row.values, self.columns, row.where)
        return example

    def make(self, rows: Sequence[Row]) -> list[Made | LeftOut]:
        """Render and tokenize the prompts of rows, in their order."""
        left_out: dict[int, LeftOut] = {}
        examples: dict[int, Example] = {}
        for row in rows:
            try:
                examples[row.number] = self.read(row)
            except FlotillaError as error:
                left_out[row.number] = LeftOut(row.number, error)
        texts: dict[int, PromptText] = {}
        for number, text in self._rendered(rows, examples).items():
            if isinstance(text, FlotillaError):
                left_out[number] = LeftOut(number, text)
            elif text.was_long and self.config.overlong_prompts == "drop":
                left_out[number] = LeftOut(number, None)
            else:
                texts[number] = text
        token_ids = self._encoded(texts)
        made: list[Made] = []
        for row in rows:
            if row.number not in texts:
                continue
            one = self._made(row, examples[row.number], texts[row.number], token_ids[row.number])
            if isinstance(one, LeftOut):
                left_out[row.number] = one
            else:
                made.append(one)
        finished: dict[int, Made | LeftOut] = {one.number: one for one in self._finished(made)}
        return [left_out.get(row.number) or finished[row.number] for row in rows]

    def _rendered(
        self, rows: Sequence[Row], examples: dict[int, Example]
    ) -> dict[int, PromptText | FlotillaError]:
        """Return the text of each example, or why it has none."""
        found: dict[int, PromptText | FlotillaError] = {}
        chats: dict[int, Chat] = {}
        for row in rows:
            if (example := examples.get(row.number)) is None:
                continue
            messages = as_messages(example.prompt, self.config)
            if messages is None:
                assert isinstance(example.prompt, str)
                found[row.number] = self._cut(example.prompt, bare=True)
            else:
                chats[row.number] = Chat(messages, example.tools, row.where)
        texts = prompt_texts(list(chats.values()), self.tokenizer) if chats else []
        for (number, chat), text in zip(chats.items(), texts, strict=True):
            if isinstance(text, FlotillaError):
                found[number] = text
            else:
                empty = InvalidConfig("the prompt is empty", where=chat.where)
                found[number] = self._cut(text) if text else empty
        return found

    def _cut(self, text: str, *, bare: bool = False) -> PromptText:
        """Keep the end of a text that cannot be within the limit, before all of it is tokenized."""
        most = SHORT_CHARACTERS + CHARACTERS_PER_TOKEN * self.config.max_prompt_tokens
        return PromptText(text[-most:], bare, len(text) > most)

    def _encoded(self, texts: dict[int, PromptText]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        # A rendered template has its own special tokens; a plain text gets the tokenizer's.
        for bare in (True, False):
            part = {number: one.text for number, one in texts.items() if one.bare is bare}
            encoded = self.tokenizer.encode_many(list(part.values()), special=bare)
            found |= dict(zip(part, encoded, strict=True))
        return found

    def _made(self, row: Row, example: Example, text: PromptText, token_ids: list[int]) -> Made | LeftOut:
        """Make the prompt; truncation keeps the end, with the question and the template's last words."""
        config = self.config
        was_long = text.was_long or len(token_ids) > config.max_prompt_tokens
        if was_long and config.overlong_prompts == "drop":
            return LeftOut(row.number, None)
        if was_long and config.overlong_prompts == "error":
            raise InvalidConfig(
                f"the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens = "
                f"{config.max_prompt_tokens}",
                where=row.where,
                why="data.overlong_prompts is error"
                + ("; of so many characters, only those at the end were counted" if text.was_long else ""),
                next_step="raise the limit, or set data.overlong_prompts to drop or truncate",
            )
        cut = np.asarray(token_ids[-config.max_prompt_tokens :], dtype=np.int32)
        others = self.columns.others(row.values, self.reads)
        prompt = Prompt(
            0,
            row.number,
            text.text,
            cut,
            example.answer,
            others,
            chat=as_messages(example.prompt, config) or [],
            answer_column=self._answer_column(row, example),
        )
        return Made(prompt, row.where, row.values, example, token_ids, was_long)

    def _answer_column(self, row: Row, example: Example) -> dict[str, Any]:
        raw = value_at(row.values, self.columns.answer)
        if raw is None or self.reads is not Reads.prompts:
            return {}
        return {self.columns.answer: example.answer if unfit(raw, self.columns.answer) else raw}

    def _finished(self, made: list[Made]) -> Iterator[Made | LeftOut]:
        for stage in self.stages:
            done = stage.finish(made, self.columns)
            yield from (one for one in done if isinstance(one, LeftOut))
            made = [one for one in done if not isinstance(one, LeftOut)]
        yield from made


Load = Callable[[Path, DataConfig, Tokenizer], PromptFile]
"""Reads a data set, by the columns that the configuration names."""


def load_prompts(
    source: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    copies: Path | None = None,
    stages: Sequence[Stage] = (),
    reads: Reads = Reads.prompts,
) -> PromptFile:
    """Read a data set with the columns that `config` names; `copies` is where files are unpacked to."""
    rows = open_rows(source, config.split, copies)
    if not len(rows):
        raise no_rows(source)
    streams = _streams(rows, config)
    looked_at = next(parts(rows, range(min(len(rows), 64))))
    first = next((row.values for row in rows.read(looked_at) if row.error is None), {})
    maker = PromptMaker(Columns.of(config, first, reads), config, tokenizer, reads, stages)
    bad = BadRows(source, len(rows), config.max_bad_rows)
    # Rows that are made now are judged by that.
    order = _judged(rows, maker, bad) if streams or config.difficulty_field else None
    about = DataSetFacts(maker.columns, rows.digests, _identity(rows, maker), order)
    file = StreamedPrompts(rows, maker, bad, about) if streams else _loaded(rows, maker, bad, about)
    if not file.first(1):
        raise InvalidConfig(
            "the data set has no prompts",
            where=str(source),
            why=f"all {file.dropped} prompts are longer than data.max_prompt_tokens = {config.max_prompt_tokens}"
            if file.dropped
            else "; ".join(bad.named),
            next_step="raise data.max_prompt_tokens" if file.dropped else "mend its rows",
        )
    return file


def _streams(rows: Rows, config: DataConfig) -> bool:
    """Return whether prompts are made when they are drawn."""
    if config.streaming == "off" and rows.nbytes > MOST_LOADED_BYTES:
        raise InvalidConfig(
            "the data set is too large to be held in memory",
            where=str(rows.source),
            why=f"data.streaming is off, and its rows have {rows.nbytes:,} bytes; the limit is {MOST_LOADED_BYTES:,}",
            next_step="leave data.streaming at auto",
        )
    large = len(rows) > STREAMED_ABOVE_ROWS or rows.nbytes > STREAMED_ABOVE_BYTES
    return config.streaming == "on" or (config.streaming == "auto" and large)


def _judged(rows: Rows, maker: PromptMaker, bad: BadRows) -> npt.NDArray[np.int64] | None:
    """Judge every row; return the order by difficulty, where the configuration asks for one."""
    column = maker.config.difficulty_field
    rules = (maker.columns, column, bad.most)
    if not maker.stages and rules in rows.judged:
        numbers, named, order = rows.judged[rules]
        bad.numbers.update(numbers)
        bad.named.extend(named)
        return order
    by_row = bool(maker.stages or column)
    proof: Proof | None = None if by_row else lambda batch: all_usable(batch, maker.columns)
    difficulty = np.zeros(len(rows) if column else 0)
    for row in rows.unproven(proof):
        try:
            maker.read(row)
            if column:
                difficulty[row.number] = _difficulty(row, column)
        except FlotillaError as error:
            bad.add(row.number, error)
    order = np.argsort(difficulty, kind="stable") if column else None
    if not maker.stages:
        rows.judged[rules] = (frozenset(bad.numbers), tuple(bad.named), order)
    return order


def _difficulty(row: Row, column: str) -> float:
    value = value_at(row.values, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise InvalidConfig(
            f"column {column!r} is {'missing' if value is None else 'not a number'}",
            where=row.where,
            why="data.order is by_field",
            next_step="give every row a number there, or set data.difficulty_field to another column",
        )
    return value


def _loaded(rows: Rows, maker: PromptMaker, bad: BadRows, about: DataSetFacts) -> PromptFile:
    """Make all prompts now."""
    prompts: list[Prompt | None] = []
    dropped = truncated = 0
    for part in parts(rows, range(len(rows))):
        for one in maker.make(rows.read(part)):
            if isinstance(one, LeftOut):
                prompts.append(None)
                if one.error is not None:
                    bad.add(one.number, one.error)
                else:
                    dropped += 1
            else:
                prompts.append(one.prompt)
                truncated += one.was_long
    return PromptFile(prompts, dropped, truncated, bad=bad, about=about)


def _identity(rows: Rows, maker: PromptMaker) -> str:
    config = maker.config
    settings = (
        maker.columns,
        config.apply_chat_template,
        config.system_prompt,
        config.max_prompt_tokens,
        config.overlong_prompts,
        maker.tokenizer.digest,
    )
    return blake2b(f"{rows.digest} {settings!r}".encode(), digest_size=16).hexdigest()
