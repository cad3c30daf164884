"""Holds what all chapters of a plan are worked out from: a run, its stack, and what both name and was read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.training_sets import HeldOut, JoinedSets, LoadedSet
from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts, SequenceLimit
from flotilla_core.config import RunConfig, StackConfig
from flotilla_data.tokenizer import Tokenizer

COUNTED_PROMPTS = 256
"""The prompts whose answers are counted for a mean."""


@dataclass(frozen=True)
class RunFacts:
    """A run whose files were read, and whose batching is chosen."""

    config: RunConfig
    stack: StackConfig
    model: ModelFacts
    """The model as it is trained: that of a reward model has another head."""
    critic: ModelFacts | None
    tokenizer: Tokenizer
    sets: list[LoadedSet]
    held_out: list[tuple[HeldOut, PromptFile]]
    longest: int
    """The most tokens that one sequence of an update can have."""
    gpu: int | None
    """The bytes of the smallest GPU of this host; None where it has none."""
    host: int
    """The bytes of the memory of this host."""

    @cached_property
    def data(self) -> JoinedSets:
        """All data sets as one."""
        return JoinedSets(self.sets)

    @property
    def given(self) -> str:
        """The kind of what the data set brings in place of samples; empty where generators make samples."""
        if self.config.data.recorded:
            return "recorded samples"
        if self.config.learns_from_pairs:
            return "pairs"
        return "answers" if self.config.algorithm.type == "sft" else ""

    @cached_property
    def samples(self) -> int:
        """The sequences of a step."""
        per_prompt: float = self.config.rollout.samples_per_prompt
        if self.given:
            # A chat may need a sequence for each of its turns.
            first = self.data.first(COUNTED_PROMPTS)
            brought = sum(len(prompt.brought) for prompt in first) / len(first)
            per_prompt = brought or (2 if self.given == "pairs" else 1)
        return math.ceil(self.config.rollout.prompts_per_step * per_prompt)

    @property
    def response_tokens(self) -> int:
        """The most tokens of a response, or of an episode."""
        return self.config.most_sample_tokens

    @property
    def step_tokens(self) -> int:
        """The most tokens that are generated for a step, with their prompts; 0 where none are."""
        return 0 if self.given else self.samples * self.longest

    @cached_property
    def adapters(self) -> AdapterFacts | None:
        """The adapters that learn in place of the whole model."""
        return None if self.config.lora is None else AdapterFacts.of(self.model, self.config.lora)

    @property
    def limit(self) -> SequenceLimit:
        """The most tokens that a sequence may have."""
        return SequenceLimit.of(self.model, self.stack.generator)


def longest_sequence(config: RunConfig, data: PromptFile) -> int:
    """Return the most tokens that one sequence of an update can have."""
    if data.first(1)[0].brought:
        return data.longest_brought
    if config.environment is not None:
        return config.environment.episode_tokens
    return data.longest_prompt + config.rollout.sampling.max_response_tokens
