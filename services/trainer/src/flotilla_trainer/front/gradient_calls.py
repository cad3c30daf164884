"""Updates call by call: gradients add up over ForwardBackward, and OptimStep makes one step of them.

Invariants: calls of one step add up to what one update on all their groups would be; a call that fails on the ranks
drops what was added up before it; the gradients are gone after a step, whatever came of it.
"""

from __future__ import annotations

import math

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidRequest
from flotilla_core.version import Version
from flotilla_trainer.front.session_progress import NOTHING_COUNTS
from flotilla_trainer.front.updates import Updates
from flotilla_trainer.objective.session_objective import call_objective, check_takes_parts, session_objective
from flotilla_trainer.wire.objective import ObjectiveSettings


class GradientCalls:
    """The calls of one session."""

    def __init__(self, asked: ObjectiveSettings, updates: Updates) -> None:
        """Share the parts of the session with its whole updates."""
        self._asked = asked
        self._updates = updates
        self._ranks, self._preparation = updates.ranks, updates.preparation
        self._progress, self._pending = updates.progress, updates.pending

    async def add(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        """Add the gradients of a batch to those that wait for their step."""
        return await self._pending.once(
            request.request_id or ids.new_request_id(), lambda: self._add(request)
        )

    async def step(self, request: pb.OptimStepRequest) -> pb.OptimStepResponse:
        """One step on the gradients that wait; without a rate, on that of the schedule."""
        rate = request.learning_rate
        if not (math.isfinite(rate) and rate >= 0):
            raise InvalidRequest(f"the learning rate is {rate}", where="learning_rate")
        progress = self._progress
        async with self._ranks.exclusive:
            self._ranks.check_open()
            progress.check_usable()
            self._pending.require()
            units, facts, sample_ids = self._pending.units, self._pending.facts(), self._pending.sample_ids
            fields = {
                "learning_rate": rate or progress.learning_rate(),
                "units": units,
                "refuse_above": request.refuse_above if request.HasField("refuse_above") else None,
            }
            # The ranks give the gradients up, whatever comes of the step.
            self._pending.clear(forget=False)
            with self._ranks.doing("optimizer step"):
                answers = await self._ranks.command("optim_step", fields)
            answer = answers[0].fields
            metrics, skipped = answer["metrics"] | facts, answer["skipped"]
            if not units:
                skipped = NOTHING_COUNTS
            elif skipped:
                progress.skipped(f"step from {progress.version}", skipped, lambda: "not kept")
            else:
                progress.made(metrics, len(sample_ids))
            return pb.OptimStepResponse(
                policy_version=progress.version.to_proto(),
                metrics=metrics,
                skipped=skipped,
                sample_ids=sample_ids,
            )

    async def _add(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        if running := self._updates.running:
            raise FailedPrecondition(
                "gradients cannot be added now",
                where=f"run {self._ranks.run_id}",
                why=f"update {running} is under way",
                next_step="wait for its result: Train and ForwardBackward exclude each other",
            )
        async with self._ranks.exclusive:
            self._ranks.check_open()
            self._progress.check_usable()
            asked = call_objective(self._asked, request.loss) if request.HasField("loss") else self._asked
            check_takes_parts(asked)
            objective = session_objective(asked)
            if isinstance(objective, type(self._progress.objective)):
                objective.restore(self._progress.objective.state())
            self._pending.check_kind(objective.unit)
            version = self._progress.version
            prepared = await self._preparation.of(self._call_name(), request.groups, version, objective)
            units = objective.units(prepared.batch)
            fields = {"objective": asked.fields(), "units": units}
            try:
                with self._ranks.doing("forward and backward"):
                    answers = await self._ranks.work("forward_backward", prepared.packed, fields)
            except FlotillaError:
                self._pending.clear(forget=True)
                raise
            metrics: dict[str, float] = answers[0].fields["metrics"]
            share = objective.metric_weight(prepared.batch)
            self._pending.add(objective.unit, units, prepared.batch.sample_ids, share, prepared.facts)
            return pb.ForwardBackwardResponse(
                metrics=metrics | prepared.metrics, policy_version=version.to_proto()
            )

    def _call_name(self) -> str:
        """The first call of a step draws what the update of that step would draw."""
        version = self._progress.version
        update_id = ids.update_id(self._ranks.run_id, Version(version.lineage, version.step + 1))
        return update_id + (f"-{self._pending.calls}" if self._pending.calls else "")
