"""Draws the prompts of a run without end, in an order that a restart repeats exactly.

Invariants: the data set of a draw depends on the seed and the number of the draw alone, so the shares hold from the
first draws on. Its level depends on the step, or on the outcomes of the steps before, which the ledger keeps. Each data
set has its own epochs, and no prompt is drawn twice in one. An order is one of all rows, and the draw passes over those
that are left out: prompts that are streamed come in the same order as others. Everything before a cursor was drawn,
rested or left out. A saved cursor fits only the same data that it was saved with.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.prompts import Load, Prompt, load_prompts
from flotilla_coordinator.data.training_sets import JoinedSets, LoadedSet, read_sets
from flotilla_core.config import CurriculumConfig, DataConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.ids import derive_seed
from flotilla_data.tokenizer import Tokenizer

SEEDS = 1 << 63
MADE_AHEAD = 64
COMPARED_PROMPTS = 16
NAMED_FILES = 16


class _Stream:
    """The position in one data set; without a seed its prompts keep their order in every epoch."""

    def __init__(self, data: LoadedSet, seed: int | None, rest_epochs: int) -> None:
        self.data = data
        self._rows = data.file.rows
        self._seed = seed
        self._rest_epochs = rest_epochs
        self._last_rest = np.zeros(self._rows, np.int16)
        """The number of epochs that each prompt rested when it was drawn last."""
        self._drawn_again_in = np.zeros(self._rows, np.int32)
        """The first epoch in which a prompt does not rest."""
        self._noted_epoch = -1
        """The newest epoch with a known outcome."""
        self._made: dict[int, Prompt | None] = {}
        """The prompts of the next rows: many are rendered and tokenized at once."""
        self.enter(0, 0)

    def next(self) -> Prompt:
        while True:
            if self._position == self._rows:
                # An epoch in which every prompt rests is skipped.
                self.enter(max(self._epoch + 1, int(self._drawn_again_in.min())), 0)
            number = int(self._order[self._position])
            if self._drawn_again_in[number] <= self._epoch and number not in self._made:
                ahead = self._order[self._position : self._position + MADE_AHEAD].tolist()
                self._made = dict(zip(ahead, self.data.read(ahead), strict=True))
            self._position += 1
            if self._drawn_again_in[number] <= self._epoch and (prompt := self._made[number]) is not None:
                return replace(prompt, epoch=self._epoch)

    def known(self, epoch: int, number: int) -> Prompt | None:
        return self.data.read([number], epoch)[0]

    def note(self, epoch: int, number: int, *, solved: bool) -> None:
        """Let a prompt rest for longer each time in a row that it was solved."""
        rest = min(2 * int(self._last_rest[number]) + 1, self._rest_epochs) if solved else 0
        self._last_rest[number] = rest
        self._drawn_again_in[number] = epoch + 1 + rest
        self._noted_epoch = max(self._noted_epoch, epoch)

    @property
    def resting(self) -> int:
        return int((self._drawn_again_in > self._noted_epoch + 1).sum())

    def pass_by(self, drawn: list[tuple[int, int]]) -> None:
        """Move past the last of these prompts, given by epoch and number, unless the position is past it already."""
        epoch = max(epoch for epoch, _ in drawn)
        numbers = [number for of, number in drawn if of == epoch]
        last = int(np.flatnonzero(np.isin(self._order_of(epoch), numbers))[-1])
        if (epoch, last) >= (self._epoch, self._position):
            self.enter(epoch, last + 1)

    def enter(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    @property
    def written_order(self) -> npt.NDArray[np.int64]:
        """The rows by ascending difficulty, or as the files have them."""
        order = self.data.file.about.order
        return np.arange(self._rows) if order is None else order

    @property
    def place(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    @property
    def drawn(self) -> int:
        return self._epoch * self._rows + self._position

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sort by random keys, because raw Philox numbers are the same in every numpy version."""
        if self._seed is None:
            return self.written_order
        keys = np.random.Philox(derive_seed(self._seed, "data order", epoch)).random_raw(self._rows)
        return np.argsort(keys, kind="stable")


class _Levels:
    """The streams of one data set, one for each level, of which one is drawn from."""

    def __init__(self, streams: Sequence[_Stream], config: CurriculumConfig | None) -> None:
        self.streams = streams
        self._config = config
        self._reached = 0
        self._rewards: deque[float] = deque(maxlen=config.prompts if config else None)

    def at(self, step: int) -> _Stream:
        """Return the stream that a step draws from: a step alone decides, or the rewards that are known."""
        last = len(self.streams) - 1
        every = self._config.every_steps if self._config else None
        return self.streams[min(step // every, last) if every else self._reached]

    def note(self, stream: _Stream, reward: float) -> None:
        """Take note of the mean reward of a prompt; those of levels that are left count no more."""
        config = self._config
        if config is None or config.reward is None or stream is not self.streams[self._reached]:
            return
        self._rewards.append(reward)
        full = len(self._rewards) == config.prompts
        if full and sum(self._rewards) / config.prompts >= config.reward and stream is not self.streams[-1]:
            self._reached += 1
            self._rewards.clear()


class PromptSource:
    """Draws prompts from all data sets of a run."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int, load: Load | None = None) -> None:
        self.sets = read_sets(config, tokenizer, load or load_prompts)
        self.file = JoinedSets(self.sets)
        self.rest_epochs = config.rest_epochs
        self.learns_outcomes = config.learns_outcomes
        self._seed = seed
        self._fingerprint = _fingerprint(self.sets)
        self._files = _changes_by_file(self.sets)
        # The first set has the same order as in a run with this set alone.
        seeds = [derive_seed(seed, "data set", place) if place else seed for place in range(len(self.sets))]
        shuffled = config.order == "shuffled"
        self._streams = [
            _Stream(one, own if shuffled else None, config.rest_epochs)
            for one, own in zip(self.sets, seeds, strict=True)
        ]
        by_set = groupby(self._streams, lambda stream: stream.data.of)
        self._levels = [_Levels([*streams], config.curriculum) for _, streams in by_set]
        self._bounds = list(accumulate(one.streams[0].data.share for one in self._levels[:-1]))

    def __len__(self) -> int:
        """Return the number of prompts of all data sets together."""
        return self.file.kept

    def next(self, step: int = 0) -> Prompt:
        """Return the next prompt, for a step, that does not rest; a data set begins its next epoch when one ends."""
        return self._drawn_from(sum(stream.drawn for stream in self._streams)).at(step).next()

    def known(self, epoch: int, index: int) -> Prompt:
        """Return a prompt that was drawn before."""
        stream, number = self._found_at(index)
        if (prompt := stream.known(epoch, number)) is None:
            raise other_data(f"there is no prompt {index} any more")
        return prompt

    def note(self, epoch: int, index: int, *, solved: bool, reward: float) -> None:
        """Take note of a prompt's outcome and mean reward; call it in the order of the steps that answers count for."""
        stream, number = self._found_at(index)
        self._levels[stream.data.of].note(stream, reward)
        if self.rest_epochs:
            stream.note(epoch, number, solved=solved)

    @property
    def resting_share(self) -> float:
        """Return the share of all prompts that rest, by the outcomes that are known."""
        return sum(stream.resting for stream in self._streams) / len(self)

    @property
    def left_out(self) -> int | None:
        """The rows that were left out so far; None where all were known before the start."""
        return self.file.rows - self.file.kept if self.file.streamed else None

    def pass_by(self, drawn: Sequence[tuple[int, int]]) -> None:
        """Move past prompts, given by epoch and index, that were drawn since the cursor was taken.

        Any prompt between them rested.
        """
        places = [(epoch, self._found_at(index)) for epoch, index in drawn]
        for stream in self._streams:
            if own := [(epoch, number) for epoch, (of, number) in places if of is stream]:
                stream.pass_by(own)

    @property
    def cursor(self) -> dict[str, Any]:
        """The place of the next prompt, as it is saved."""
        places = [stream.place for stream in self._streams]
        return {"sets": places, "data": self._fingerprint, "files": self._files}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue exactly where `cursor` was taken."""
        if "files" not in cursor:
            self._require_tokens_of(cursor["data"])
        elif cursor["data"] != self._fingerprint:
            names = {*cursor["files"], *self._files}
            changed = sorted(name for name in names if cursor["files"].get(name) != self._files.get(name))
            raise other_data(
                f"{', '.join(changed)} changed since then"
                if changed
                else "its columns, the tokenizer, the chat template or data.max_prompt_tokens changed since then"
            )
        # An older cursor of a run with one data set was that set's place itself.
        for stream, place in zip(self._streams, cursor.get("sets", [cursor]), strict=True):
            stream.enter(place["epoch"], place["position"])

    def _require_tokens_of(self, fingerprint: str) -> None:
        """Check a cursor of an earlier release, which went by tokens and by places among the prompts that were kept."""
        if self.file.kept < self.file.rows:
            raise other_data("an earlier release counted places without the rows that are left out")
        orders = [stream.written_order.tolist() for stream in self._streams]
        read = [one.read(order) for one, order in zip(self.sets, orders, strict=True)]
        prompts = [prompt for own in read for prompt in own if prompt is not None]
        if fingerprint != _token_fingerprint(prompts):
            raise other_data("the training files, the tokenizer or data.max_prompt_tokens changed since then")

    def _found_at(self, index: int) -> tuple[_Stream, int]:
        """Return the data set of a prompt, and its row there."""
        for stream in self._streams:
            if 0 <= index - stream.data.before < stream.data.file.rows:
                return stream, index - stream.data.before
        raise other_data(f"there is no prompt {index} any more")

    def _drawn_from(self, draw: int) -> _Levels:
        return self._levels[bisect(self._bounds, derive_seed(self._seed, "data mixture", draw) / SEEDS)]


def other_data(why: str) -> FailedPrecondition:
    """Make the error for data that is no longer the data of the run's start."""
    return FailedPrecondition(
        "the saved place in the data set does not fit the data",
        why=why,
        next_step="restore it, or start a new run",
    )


def _fingerprint(sets: Sequence[LoadedSet]) -> str:
    """Return a digest of what prompts are made of, and of the first ones, which tell chat templates apart."""
    made_of = blake2b(digest_size=8)
    for one in sets:
        made_of.update(f"{one.file.about.identity} {one.file.rows} ".encode())
        made_of.update(_token_fingerprint(one.file.first(COMPARED_PROMPTS)).encode())
    return made_of.hexdigest()


def _token_fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.index.to_bytes(8, "little"))
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(prompt.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _changes_by_file(sets: Sequence[LoadedSet]) -> dict[str, str]:
    """Return a digest for each file; one for each data set where there are too many to save with every step."""
    files = {name: digest for one in sets for name, digest in one.file.about.digests.items()}
    if len(files) > NAMED_FILES:
        files = {str(one.path): " ".join(one.file.about.digests.values()) for one in sets}
        files = {name: blake2b(text.encode(), digest_size=8).hexdigest() for name, text in files.items()}
    return {name: digest[:16] for name, digest in files.items()}
