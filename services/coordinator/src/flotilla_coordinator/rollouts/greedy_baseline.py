"""The greedy response to a prompt, whose reward the samples of its group are compared with.

Invariants: it has the limits, the oldest version and the place in line of the samples beside it, and the same rewards
score it; it is no sample itself, so neither the ledger nor an update ever holds it; a group whose samples are recorded
in part is compared with the number that is recorded with them, never with a new response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import Generation, GenerationRequest
from flotilla_coordinator.rollouts.samples import rollout_sample
from flotilla_coordinator.rollouts.score_item import score_item
from flotilla_coordinator.rollouts.scoring import Outcome, Scorer
from flotilla_core.version import Version


class GreedyBaseline:
    """Answers the prompts of groups greedily."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation,
        scorer: Scorer,
        proved: Callable[[Version], Awaitable[None]],
    ) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._scorer = scorer
        self._proved = proved

    async def outcome(
        self, group_id: str, prompt: Prompt, beside: GenerationRequest, recorded: Sequence[RolloutSample]
    ) -> Outcome:
        """What the greedy response earns that is drawn with the samples of a request, or earned with recorded ones."""
        if recorded:
            return Outcome(recorded[0].greedy_reward)
        request = replace(
            beside,
            sample_ids=(f"{group_id}/greedy",),
            sampling=beside.sampling.model_copy(update={"temperature": 0.0}),
        )
        async with aclosing(self._generation.samples(request)) as samples:
            (response,) = [rollout_sample(generated, self._tokenizer) async for generated in samples]
        for span in response.spans:
            await self._proved(span.version)
        item = score_item(response.sample_id, prompt, response.text, response.token_ids)
        return (await self._scorer.score([item]))[response.sample_id]
