"""Greedy evaluation on held-out prompts.

Invariants: evaluation samples never enter the ledger or an update; accuracy is the share of prompts whose
reward total is at least 1; a reward error or timeout is counted as a failure of the evaluation, never as a
wrong answer.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, aclosing
from typing import Any

from flotilla.reward.v1 import reward_pb2
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.runs.generation import Generation, GenerationRequest
from flotilla_coordinator.runs.score_item import score_item
from flotilla_coordinator.runs.scoring import Outcome, Scorer
from flotilla_coordinator.runs.together import all_of
from flotilla_core import telemetry
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import UserCodeError
from flotilla_core.telemetry import names
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version

PROMPTS_PER_SCORE_CALL = 64
CONCURRENT_PROMPTS = 256


def evaluation_span(run_id: str, version: Version, step: int) -> AbstractContextManager[Any]:
    """One evaluation on the timeline, whatever it asks."""
    attributes: dict[str, str | int] = {
        names.RUN_ID: run_id,
        names.STEP: step,
        names.POLICY_VERSION: str(version),
    }
    return telemetry.span(names.RL_EVALUATE, attributes=attributes)


class Evaluator:
    """Answers every held-out prompt once, greedily, on one version."""

    needs_generators = True

    def __init__(
        self,
        run_id: str,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        generation: Generation,
        scorer: Scorer,
        max_response_tokens: int,
        timeout_s: float,
    ) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._generation = generation
        self._scorer = scorer
        self._sampling = SamplingConfig(temperature=0.0, max_response_tokens=max_response_tokens)
        self._timeout_s = timeout_s

    async def accuracy(self, version: Version, step: int) -> float:
        """Share of held-out prompts that `version` answers right."""
        with evaluation_span(self._run_id, version, step):
            gate = asyncio.Semaphore(CONCURRENT_PROMPTS)
            items = await all_of(self._answer(prompt, version, gate) for prompt in self._prompts)
            totals: list[Outcome] = []
            for start in range(0, len(items), PROMPTS_PER_SCORE_CALL):
                outcomes = await self._scorer.score(items[start : start + PROMPTS_PER_SCORE_CALL])
                totals.extend(outcomes.values())
        failed = [outcome for outcome in totals if outcome.total is None]
        if failed:
            raise UserCodeError(
                f"{len(failed)} of {len(totals)} held-out answers could not be scored",
                where=f"evaluation at step {step}",
                why=failed[0].failure,
                next_step="fix the reward function or raise its timeout_s",
            )
        return sum(outcome.total is not None and outcome.total >= 1.0 for outcome in totals) / len(totals)

    async def _answer(
        self, prompt: Prompt, version: Version, gate: asyncio.Semaphore
    ) -> reward_pb2.ScoreItem:
        sample_id = f"{self._run_id}/eval/{version}/{prompt.index}"
        request = GenerationRequest(
            prompt.token_ids, (sample_id,), self._sampling, version, self._timeout_s, max_attempts=5
        )
        async with gate, aclosing(self._generation.samples(request)) as samples:
            async for generated in samples:
                token_ids = from_tensor(generated.response.token_ids)
                return score_item(sample_id, prompt, self._tokenizer.decode(token_ids.tolist()), token_ids)
        raise AssertionError("a generation without a sample raises Exhausted")
