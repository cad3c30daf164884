"""Evaluation on held-out pairs: how often the answer that is preferred is the one that the trainer ranks higher.

Invariants: nothing is generated and nothing is trained; accuracy is that of single pairs over all of them, however they
are cut into calls.
"""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.evaluation.evaluate import evaluation_span
from flotilla_coordinator.evaluation.evaluation import Evaluation
from flotilla_coordinator.gangs.group_messages import parts
from flotilla_coordinator.gangs.policy import PolicyTrainer
from flotilla_coordinator.rollouts.answers import given_group
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_core.version import Version

ACCURACY = "preference/accuracy"


class PairEvaluator:
    """Judges every held-out pair once."""

    needs_generators = False

    def __init__(self, run_id: str, prompts: list[Prompt], policy: PolicyTrainer) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._policy = policy

    async def evaluate(self, version: Version, step: int) -> Evaluation:
        """Share of held-out pairs that `version` ranks right; a pair without a difference counts half."""
        with evaluation_span(self._run_id, version, step):
            right = 0.0
            for groups in parts(self._groups()):
                metrics = await self._policy.evaluate_loss(groups)
                right += metrics[ACCURACY] * len(groups)
        return Evaluation(right / len(self._prompts))

    def _groups(self) -> Iterator[RolloutGroup]:
        """All pairs."""
        for prompt in self._prompts:
            assert prompt.pair is not None, "held-out data of such a run is read in pairs"
            yield given_group(self._run_id, prompt, [prompt.pair.chosen, prompt.pair.rejected])
