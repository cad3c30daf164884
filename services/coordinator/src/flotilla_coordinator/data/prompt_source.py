"""Draws the prompts of a run without end, in an order that a restart repeats exactly.

Invariants: the data set of a draw depends on the seed and the number of the draw alone, so the shares hold from the
first draws on. Each data set has its own epochs, and no prompt is drawn twice in one. Everything before a cursor was
drawn or rested. A saved cursor fits only the same data that it was saved with.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.prompts import Load, Prompt, load_prompts
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.data.training_sets import joined, read_sets
from flotilla_core.config import DataConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.ids import derive_seed

SEEDS = 1 << 63


class _Stream:
    """The position in one data set; without a seed its prompts keep their order in every epoch."""

    def __init__(self, prompts: list[Prompt], seed: int | None, rest_epochs: int) -> None:
        self.prompts = prompts
        self._seed = seed
        self._rest_epochs = rest_epochs
        self._last_rest = np.zeros(len(prompts), np.int64)
        """The number of epochs that each prompt rested when it was drawn last."""
        self._drawn_again_in = np.zeros(len(prompts), np.int64)
        """The first epoch in which a prompt does not rest."""
        self._noted_epoch = -1
        """The newest epoch with a known outcome."""
        self.enter(0, 0)

    def next(self) -> Prompt:
        while True:
            if self._position == len(self.prompts):
                # An epoch in which every prompt rests is skipped.
                self.enter(max(self._epoch + 1, int(self._drawn_again_in.min())), 0)
            number = int(self._order[self._position])
            self._position += 1
            if self._drawn_again_in[number] <= self._epoch:
                return replace(self.prompts[number], epoch=self._epoch)

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
    def place(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    @property
    def drawn(self) -> int:
        return self._epoch * len(self.prompts) + self._position

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sort by random keys, because raw Philox numbers are the same in every numpy version."""
        if self._seed is None:
            return np.arange(len(self.prompts))
        keys = np.random.Philox(derive_seed(self._seed, "data order", epoch)).random_raw(len(self.prompts))
        return np.argsort(keys, kind="stable")


class PromptSource:
    """Draws prompts from all data sets of a run."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int, load: Load | None = None) -> None:
        sets = read_sets(config, tokenizer, load or load_prompts)
        self.file = joined(sets)
        self.rest_epochs = config.rest_epochs
        self._seed = seed
        self._fingerprint = _fingerprint(self.file.prompts)
        # The first set has the same order as in a run with this set alone.
        seeds = [derive_seed(seed, "data set", place) if place else seed for place in range(len(sets))]
        shuffled = config.order == "shuffled"
        self._streams = [
            _Stream(one.file.prompts, own if shuffled else None, config.rest_epochs)
            for one, own in zip(sets, seeds, strict=True)
        ]
        self._found_at = {
            prompt.index: (stream, number)
            for stream in self._streams
            for number, prompt in enumerate(stream.prompts)
        }
        self._bounds = list(accumulate(one.share for one in sets[:-1]))

    def __len__(self) -> int:
        """Return the number of prompts of all data sets together."""
        return len(self.file.prompts)

    def next(self) -> Prompt:
        """Return the next prompt that does not rest; each data set begins its next epoch when one ends."""
        return self._drawn_from(sum(stream.drawn for stream in self._streams)).next()

    def known(self, epoch: int, index: int) -> Prompt:
        """Return a prompt that was drawn before."""
        if index not in self._found_at:
            raise other_data(f"there is no prompt {index} any more")
        stream, number = self._found_at[index]
        return replace(stream.prompts[number], epoch=epoch)

    def note(self, epoch: int, index: int, *, solved: bool) -> None:
        """Take note of whether a prompt was solved; call it in the order of the steps that the answers count for."""
        stream, number = self._found_at[index]
        stream.note(epoch, number, solved=solved)

    @property
    def resting_share(self) -> float:
        """Return the share of all prompts that rest, by the outcomes that are known."""
        return sum(stream.resting for stream in self._streams) / len(self)

    def pass_by(self, drawn: Sequence[tuple[int, int]]) -> None:
        """Move past prompts, given by epoch and index, that were drawn since the cursor was taken.

        Any prompt between them rested.
        """
        places = [(epoch, self._found_at[index]) for epoch, index in drawn]
        for stream in self._streams:
            if own := [(epoch, number) for epoch, (of, number) in places if of is stream]:
                stream.pass_by(own)

    @property
    def cursor(self) -> dict[str, Any]:
        """The place of the next prompt, as it is saved."""
        return {"sets": [stream.place for stream in self._streams], "data": self._fingerprint}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue exactly where `cursor` was taken."""
        if cursor["data"] != self._fingerprint:
            raise other_data("the training files, the tokenizer or data.max_prompt_tokens changed since then")
        # An older cursor of a run with one data set was that set's place itself.
        for stream, place in zip(self._streams, cursor.get("sets", [cursor]), strict=True):
            stream.enter(place["epoch"], place["position"])

    def _drawn_from(self, draw: int) -> _Stream:
        return self._streams[bisect(self._bounds, derive_seed(self._seed, "data mixture", draw) / SEEDS)]


def other_data(why: str) -> FailedPrecondition:
    """Make the error for data that is no longer the data of the run's start."""
    return FailedPrecondition(
        "the saved place in the data set does not fit the data",
        why=why,
        next_step="restore it, or start a new run",
    )


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.index.to_bytes(8, "little"))
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(prompt.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
