"""Prompts of a run without end, in an order that a restart repeats exactly.

Invariants: which data set the n-th draw takes depends on the seed and n alone, so shares hold from the first draws on;
each set goes through its own epochs; a saved cursor fits only the very data that it was saved with.
"""

from __future__ import annotations

from bisect import bisect
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
    """Where one data set stands; no seed keeps the order of its prompts in every epoch."""

    def __init__(self, prompts: list[Prompt], seed: int | None) -> None:
        self._prompts = prompts
        self._seed = seed
        self.enter(0, 0)

    def next(self) -> Prompt:
        if self._position == len(self._prompts):
            self.enter(self._epoch + 1, 0)
        prompt: Prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return replace(prompt, epoch=self._epoch)

    def enter(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    @property
    def place(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    @property
    def drawn(self) -> int:
        return self._epoch * len(self._prompts) + self._position

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sorted by random keys: raw Philox numbers are the same in every numpy version."""
        if self._seed is None:
            return np.arange(len(self._prompts))
        keys = np.random.Philox(derive_seed(self._seed, "data order", epoch)).random_raw(len(self._prompts))
        return np.argsort(keys, kind="stable")


class PromptSource:
    """Draws from all data sets of a run."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int, load: Load | None = None) -> None:
        sets = read_sets(config, tokenizer, load or load_prompts)
        self.file = joined(sets)
        self._by_index = {prompt.index: prompt for prompt in self.file.prompts}
        self._seed = seed
        self._fingerprint = _fingerprint(self.file.prompts)
        # The first set's order is that of a run that has no other.
        seeds = [derive_seed(seed, "data set", place) if place else seed for place in range(len(sets))]
        shuffled = config.order == "shuffled"
        self._streams = [
            _Stream(one.file.prompts, own if shuffled else None) for one, own in zip(sets, seeds, strict=True)
        ]
        self._bounds = list(accumulate(one.share for one in sets[:-1]))

    def __len__(self) -> int:
        """Prompts of all data sets together."""
        return len(self.file.prompts)

    def next(self) -> Prompt:
        """The next prompt; the next epoch of its data set begins where one ends."""
        return self._drawn_from(sum(stream.drawn for stream in self._streams)).next()

    def known(self, epoch: int, index: int) -> Prompt:
        """A prompt that was drawn before."""
        if index not in self._by_index:
            raise other_data(f"there is no prompt {index} any more")
        return replace(self._by_index[index], epoch=epoch)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the next prompt will come from."""
        return {"sets": [stream.place for stream in self._streams], "data": self._fingerprint}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Go on exactly where `cursor` was taken."""
        if cursor["data"] != self._fingerprint:
            raise other_data("the training files, the tokenizer or data.max_prompt_tokens changed since then")
        # A cursor of a run with one data set was once its place alone.
        for stream, place in zip(self._streams, cursor.get("sets", [cursor]), strict=True):
            stream.enter(place["epoch"], place["position"])

    def _drawn_from(self, draw: int) -> _Stream:
        return self._streams[bisect(self._bounds, derive_seed(self._seed, "data mixture", draw) / SEEDS)]


def other_data(why: str) -> FailedPrecondition:
    """What a run began with is not what there is now."""
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
