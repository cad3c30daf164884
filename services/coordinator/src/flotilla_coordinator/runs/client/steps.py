"""Records the optimizer steps of a client as steps of its run.

Invariants: a repeated request makes and records one step; a step is recorded before anything builds on it; samples are
used by the step that applies their gradients, and by no other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.rollouts.batch import Batch, batch_metrics
from flotilla_coordinator.runs.client.sampling import ClientSampling
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.trainers.learners import StepUpdates
from flotilla_core import ids, rpc, telemetry
from flotilla_core.telemetry import names
from flotilla_core.version import Version

STEP_TIMEOUT_S = 3600.0
KEPT_STEPS = 64


@dataclass(frozen=True)
class _MadeStep:
    """A step that the trainer has made, until every record has it."""

    request_id: str
    step: int
    version: Version
    reply: train.OptimStepResponse


class ClientSteps:
    """The steps of one run; callers hold `ClientCalls.exclusive`."""

    def __init__(self, run: RunContext, prompts: PromptSource, sampling: ClientSampling) -> None:
        self._run = run
        self._prompts = prompts
        self._sampling = sampling
        self._rewards: dict[str, float] = {}
        self._made: OrderedDict[str, train.OptimStepResponse] = OrderedDict()
        self._unrecorded: _MadeStep | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Start to measure the first step."""
        self._began = time.monotonic()

    def add(self, rewards: Mapping[str, float]) -> None:
        """Note the rewards of samples whose gradients wait for their step."""
        self._rewards |= rewards

    async def make(self, request_id: str, rate: float) -> train.OptimStepResponse:
        """Make one step, or return the answer to one that was made."""
        await self.record()
        if request_id in self._made:
            return self._made[request_id]
        run = self._run
        version, step = run.policy.version, run.steps_done
        request = train.OptimStepRequest(
            run_id=run.run_id,
            request_id=request_id,
            learning_rate=rate,
            refuse_above=run.policy.agreement.fail_at,
        )
        attributes: dict[str, Any] = {names.RUN_ID: run.run_id, names.STEP: step}
        with telemetry.span(names.RL_TRAIN, attributes=attributes):
            reply: train.OptimStepResponse = await rpc.unary(
                run.policy.stub.OptimStep, request, timeout_s=STEP_TIMEOUT_S
            )
        run.policy.version = Version.from_proto(reply.policy_version)
        self._unrecorded = _MadeStep(request_id, step, version, reply)
        await self.record()
        return reply

    async def record(self) -> None:
        """Record the last step, with the samples that it used for the first time, everywhere.

        Where that fails, the next call that depends on the step tries again.
        """
        if (made := self._unrecorded) is None:
            return
        run, reply = self._run, made.reply
        # Calls whose gradients were dropped are not part of the step.
        rewards = {
            sample_id: self._rewards[sample_id]
            for sample_id in reply.sample_ids
            if sample_id in self._rewards
        }
        batch = Batch(made.step, self._sampling.unused(rewards), self._prompts.cursor)
        batch.metrics.update(batch_metrics(batch, made.version))
        if reply.skipped:
            # Nothing was trained: the samples are kept for a later step, or until the end of the run.
            batch.groups = []
        await run.ledger.group_scored(batch.samples)
        update = train.UpdateResult(
            update_id=ids.update_id(run.run_id, Version(made.version.lineage, made.step + 1)),
            policy_version=reply.policy_version,
            skipped=reply.skipped,
            metrics=reply.metrics,
        )
        await run.record_update(made.step, made.version, batch, StepUpdates(update))
        now = time.monotonic()
        run.end_step(made.step, now - self._began)
        run.metrics.clear()
        self._began = now
        self._sampling.use(sample.sample_id for sample in batch.samples)
        for sample_id in rewards:
            del self._rewards[sample_id]
        self._unrecorded = None
        self._made[made.request_id] = reply
        while len(self._made) > KEPT_STEPS:
            self._made.popitem(last=False)
