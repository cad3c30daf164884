"""Keep the front's record of gradients that were summed on the ranks and wait for their step.

Invariants: gradients are for one version and share one kind of denominator; a call counts once however often it is
sent; when gradients are dropped, the answers to their calls are dropped with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.front.idempotent_calls import IdempotentCalls
from flotilla_trainer.objective.base import WHOLE_UPDATES

KEPT_REPLIES = 4096
NOT_MEANS = ("advantages/std", "explained_variance")
"""The facts of a batch that are no means over its parts."""

Respond = Callable[[], Awaitable[pb.ForwardBackwardResponse]]


class PendingGradients:
    """The ForwardBackward calls since the last step."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._replies: IdempotentCalls[pb.ForwardBackwardResponse] = IdempotentCalls(KEPT_REPLIES)
        self._kind = ""
        self._share = 0.0
        self._sums: dict[str, float] = {}
        self.calls = 0
        self.sample_ids: list[str] = []
        self.units = 0.0
        """The number that the sum of the gradients is divided by."""

    async def once(self, request_id: str, call: Respond) -> pb.ForwardBackwardResponse:
        """Run `call` once for this request and return its answer; a repeat gets the same answer."""
        return await self._replies.run(request_id, call)

    def refuse(self, what: str) -> None:
        """Refuse an action that is impossible while gradients wait."""
        if self.calls:
            raise FailedPrecondition(
                f"{what} cannot be done now",
                where=f"run {self._run_id}",
                why=f"the gradients of {self.calls} ForwardBackward calls wait for their step",
                next_step="call OptimStep first",
            )

    def require(self) -> None:
        """Refuse a step without gradients."""
        if not self.calls:
            raise FailedPrecondition(
                "there are no gradients to step on",
                where=f"run {self._run_id}",
                why="no ForwardBackward call succeeded since the last step, or one that failed dropped them",
                next_step="call ForwardBackward first",
            )

    def check_kind(self, kind: str) -> None:
        """Refuse to add gradients with another kind of denominator."""
        if self.calls and kind != self._kind:
            raise FailedPrecondition(
                f"a loss that is a mean over {kind} does not add up with means over {self._kind}",
                where=f"run {self._run_id}",
                why="the losses of one step are divided by one number",
                next_step="take the step between the two losses, or set algorithm.aggregation to token_mean",
            )

    def add(
        self, kind: str, units: float, sample_ids: list[str], share: float, facts: dict[str, float]
    ) -> None:
        """Record one more call; its facts are means over `share` tokens or pairs."""
        self._kind = kind
        self.calls += 1
        self.units = max(self.units, units) if kind == WHOLE_UPDATES else self.units + units
        self.sample_ids += sample_ids
        self._share += share
        for name, value in facts.items():
            if name not in NOT_MEANS:
                self._sums[name] = self._sums.get(name, 0.0) + value * share

    def facts(self) -> dict[str, float]:
        """Return the facts of the batches of all calls, as if they were one batch."""
        return {name: value / self._share for name, value in self._sums.items()}

    def clear(self, *, forget: bool) -> None:
        """Record that no gradients are left; `forget` the calls if no step used them, so that they may be repeated."""
        self._kind, self._share, self._sums = "", 0.0, {}
        self.calls, self.sample_ids, self.units = 0, [], 0.0
        if forget:
            self._replies = IdempotentCalls(KEPT_REPLIES)
