"""Samples groups for a client: prompts go to the generators, and recorded samples come back.

Invariants: every sample is in the ledger before a generator gets it, and with its tokens before the client gets them.
Ids never repeat within a run, and so seeds do not either. A sample is recorded with an update at most once. The client
draws the prompts itself, so no batch is made here, and samples of such a run are never replayed from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from flotilla_coordinator.data.chat_turns import Chat, prompt_text
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import GroupIssue
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest, Sampler
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_coordinator.rollouts.source import CursorAlone
from flotilla_core import ids, telemetry
from flotilla_core.config import RolloutConfig, SamplingConfig
from flotilla_core.telemetry import names
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer

CALLS_PER_LINEAGE = 1_000_000
MOST_UNUSED = 100_000
"""Older samples beyond this are left out of the records of updates; the ledger counts them as dropped at the end."""


@dataclass(frozen=True)
class ClientPrompt:
    """A prompt of a client."""

    text: str
    token_ids: np.ndarray
    conversation: str = ""
    """The conversation that the prompt continues."""
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """Other columns of the data set."""


class ClientSampling:
    """Draws samples for one run, and remembers those that no update has used."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        lineage: int,
        tokenizer: Tokenizer,
        sampler: Sampler,
        ledger: Ledger,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._ledger = ledger
        # Groups of an earlier lineage keep their ids.
        self._call = lineage * CALLS_PER_LINEAGE
        self._unused: dict[str, tuple[RolloutGroup, RolloutSample]] = {}
        self._scored: set[str] = set()
        self._works: set[asyncio.Task[tuple[int, RolloutGroup]]] = set()

    @property
    def busy(self) -> bool:
        """Return whether groups are still being drawn."""
        return any(not work.done() for work in self._works)

    def prompt(
        self,
        text: str,
        token_ids: np.ndarray | None,
        conversation: str = "",
        *,
        answer: str = "",
        info: dict[str, Any] | None = None,
        chat: Chat | None = None,
    ) -> ClientPrompt:
        """Return a prompt with its tokens; those of a chat come from its rendered text."""
        if token_ids is None:
            if chat is not None:
                text = prompt_text(chat, self._tokenizer)
            # A rendered template has its own special tokens.
            token_ids = np.array(self._tokenizer.encode(text, special=chat is None), np.int32)
        text = text or self._tokenizer.decode(token_ids.tolist())
        return ClientPrompt(text, token_ids.astype(np.int32), conversation, answer, info or {})

    async def groups(
        self,
        prompts: Sequence[ClientPrompt],
        count: int,
        sampling: SamplingConfig,
        version: Version,
        step: int,
    ) -> AsyncGenerator[tuple[int, RolloutGroup]]:
        """Yield each group with the index of its prompt, as soon as it is complete."""
        call, self._call = self._call, self._call + 1

        async def one(index: int, prompt: ClientPrompt) -> tuple[int, RolloutGroup]:
            group_id = ids.group_id(self._run_id, call, index)
            sample_ids = tuple(ids.sample_id(group_id, number) for number in range(count))
            attributes: dict[str, Any] = {
                names.RUN_ID: self._run_id,
                names.STEP: step,
                names.GROUP_ID: group_id,
            }
            with telemetry.span(names.RL_SAMPLE, attributes=attributes):
                issue = GroupIssue(self._run_id, group_id, sample_ids, step, 0, prompt.text, prompt.token_ids)
                await self._ledger.group_issued(issue)
                request = GenerationRequest(
                    prompt_token_ids=prompt.token_ids,
                    sample_ids=sample_ids,
                    sampling=sampling,
                    min_version=version,
                    timeout_s=self._config.sample_timeout_s,
                    max_attempts=self._config.max_attempts,
                    resume_partial=self._config.resume_partial,
                    conversation=prompt.conversation,
                )
                return index, await self._sampled(request, prompt, group_id)

        tasks = [asyncio.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
        self._works.update(tasks)
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._works.difference_update(tasks)

    async def close(self) -> None:
        """Cancel what is still under way, and record the rewards of samples that the client did not train on."""
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        rejected = [sample for name, (_, sample) in self._unused.items() if name in self._scored]
        self._scored.clear()
        if rejected:
            await self._ledger.group_scored(rejected)

    def scored(self, outcomes: Mapping[str, Outcome]) -> None:
        """Note the rewards of the run; those that the client sends with gradients take their place."""
        for sample_id, outcome in outcomes.items():
            if outcome.total is not None and (known := self._unused.get(sample_id)) is not None:
                known[1].take_outcome(outcome)
                self._scored.add(sample_id)

    def continued(self, responses: Mapping[str, np.ndarray]) -> None:
        """Note the whole responses that are trained: of several turns, where the client went on after the first."""
        for sample_id, token_ids in responses.items():
            known = self._unused.get(sample_id)
            if known is not None and len(token_ids) > len(known[1].token_ids):
                known[1].text = self._tokenizer.decode(token_ids.tolist())

    def unused(self, rewards: dict[str, float]) -> list[RolloutGroup]:
        """Return the samples that no update has used yet, with the client's rewards, by group."""
        groups: dict[str, RolloutGroup] = {}
        for sample_id, reward in rewards.items():
            if (known := self._unused.get(sample_id)) is None:
                continue
            origin, sample = known
            sample.reward = reward
            group = groups.setdefault(origin.group_id, replace(origin, samples=[]))
            group.samples.append(sample)
        return list(groups.values())

    def use(self, sample_ids: Iterable[str]) -> None:
        """Note that these samples are in the record of an update."""
        for sample_id in sample_ids:
            self._unused.pop(sample_id, None)
            self._scored.discard(sample_id)

    async def _sampled(self, request: GenerationRequest, prompt: ClientPrompt, group_id: str) -> RolloutGroup:
        group = RolloutGroup(
            group_id, prompt.text, prompt.token_ids, [], answer=prompt.answer, info=prompt.info
        )
        async with aclosing(self._sampler.samples(request)) as samples:
            group.samples += [sample async for sample in samples]
        group.samples.sort(key=lambda sample: request.sample_ids.index(sample.sample_id))
        await self._ledger.group_generated(group.samples)
        for sample in group.samples:
            self._unused[sample.sample_id] = (group, sample)
        while len(self._unused) > MOST_UNUSED:
            del self._unused[next(iter(self._unused))]
        return group


class ClientSource(CursorAlone):
    """The place in the data set of a run whose client draws the prompts, as checkpoints save and restore it."""

    samples_from_policy = True

    async def batch(self, step: int, version: Version) -> NoReturn:
        """Refuse, because the client makes its own batches."""
        raise AssertionError("a run whose client makes the steps is not asked for a batch")
