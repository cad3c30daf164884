"""Makes batches of given answers: one to a prompt, or a pair of which one is preferred.

Invariants: a batch is `prompts_per_step` prompts in the source's order. Each response ends with the end-of-sequence
token. Nothing is generated, so nothing enters the ledger.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Answer, Prompt
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core import ids
from flotilla_core.config import RunConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.version import Version


class SupervisedSource:
    """Makes batches of prompts with their given answers."""

    samples_from_policy = False

    def __init__(
        self, run_id: str, prompts: PromptSource, tokenizer: Tokenizer, prompts_per_step: int
    ) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._prompts_per_step = prompts_per_step

    async def restore(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Continue from the cursor."""
        if cursor is not None:
            self._prompts.restore(cursor)

    def reconfigure(self, config: RunConfig) -> None:
        """Do nothing: no setting that can change concerns given answers."""

    def admit(self, step: int, version: Version) -> None:
        """Do nothing: answers need no preparation."""

    async def batch(self, step: int, version: Version) -> Batch:
        """Return the next prompts and their answers."""
        prompts = [self._prompts.next() for _ in range(self._prompts_per_step)]
        groups = [given_group(self._run_id, prompt, self._answers(prompt)) for prompt in prompts]
        return Batch(step=step, groups=groups, cursor=self._prompts.cursor)

    async def close(self) -> None:
        """Do nothing: no work is ever under way."""

    def _answers(self, prompt: Prompt) -> list[Answer]:
        if prompt.pair is not None:
            return [prompt.pair.chosen, prompt.pair.rejected]
        if not prompt.answer:
            raise InvalidConfig(
                f"prompt {prompt.index} has no answer to imitate",
                where="data.train",
                why="algorithm.type is sft",
                next_step="add the column named by data.answer_field",
            )
        tokens = [*self._tokenizer.encode(prompt.answer), self._tokenizer.eos_id]
        return [Answer(prompt.answer, np.asarray(tokens, dtype=np.int32))]


def given_group(run_id: str, prompt: Prompt, answers: list[Answer]) -> RolloutGroup:
    """Return a prompt with its answers, in their order, as the samples that the trainer gets."""
    group_id = ids.group_id(run_id, prompt.epoch, prompt.index)
    samples = [
        RolloutSample(
            sample_id=ids.sample_id(group_id, place),
            token_ids=answer.token_ids,
            logprobs=None,
            text=answer.text,
        )
        for place, answer in enumerate(answers)
    ]
    return RolloutGroup(
        group_id, prompt.prompt_text, prompt.token_ids, samples, answer=prompt.answer, info=prompt.info
    )
