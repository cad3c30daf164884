"""Supervised batches: the data set's own answers as responses.

Invariants: a batch is `prompts_per_step` prompts in the source's order; each response ends with the end-of-
sequence token; nothing is generated, so nothing enters the ledger.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flotilla_coordinator.data.prompts import Prompt, PromptSource
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.runs.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core import ids
from flotilla_core.errors import InvalidConfig
from flotilla_core.version import Version


class AnswerSource:
    """Batches of prompts with their answers."""

    samples_from_policy = False

    def __init__(
        self, run_id: str, prompts: PromptSource, tokenizer: Tokenizer, prompts_per_step: int
    ) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._prompts_per_step = prompts_per_step

    async def go_on(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Take the answers from there on."""
        if cursor is not None:
            self._prompts.restore(cursor)

    def admit(self, step: int, version: Version) -> None:
        """Nothing to prepare: answers are at hand."""

    async def batch(self, step: int, version: Version) -> Batch:
        """The next prompts and their answers."""
        groups = [self._group(self._prompts.next()) for _ in range(self._prompts_per_step)]
        return Batch(step=step, groups=groups, cursor=self._prompts.cursor)

    async def close(self) -> None:
        """Nothing is ever under way."""

    def _group(self, prompt: Prompt) -> RolloutGroup:
        if not prompt.answer:
            raise InvalidConfig(
                f"prompt {prompt.index} has no answer to imitate",
                where="data.train",
                why="algorithm.type is sft",
                next_step="add the column named by data.answer_field",
            )
        group_id = ids.group_id(self._run_id, prompt.epoch, prompt.index)
        tokens = [*self._tokenizer.encode(prompt.answer), self._tokenizer.eos_id]
        sample = RolloutSample(
            sample_id=ids.sample_id(group_id, 0),
            token_ids=np.asarray(tokens, dtype=np.int32),
            logprobs=None,
            text=prompt.answer,
        )
        return RolloutGroup(group_id, prompt.prompt_text, prompt.token_ids, [sample])
