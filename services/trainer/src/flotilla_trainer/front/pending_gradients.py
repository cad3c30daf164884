"""What the front knows of gradients that were added up on the ranks and wait for their step.

Invariants: gradients are for one version and share one kind of denominator; a call counts once however often it is
sent; when gradients are dropped, the answers to their calls are forgotten with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.front.idempotent_calls import IdempotentCalls
from flotilla_trainer.objective.base import WHOLE_UPDATES

KEPT_REPLIES = 4096
NOT_MEANS = ("advantages/std", "explained_variance")
"""What a batch says about itself that its parts do not add up to."""

Respond = Callable[[], Awaitable[pb.ForwardBackwardResponse]]


class PendingGradients:
    """The calls since the last step."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._replies: IdempotentCalls[pb.ForwardBackwardResponse] = IdempotentCalls(KEPT_REPLIES)
        self._kind = ""
        self._share = 0.0
        self._sums: dict[str, float] = {}
        self.calls = 0
        self.sample_ids: list[str] = []
        self.units = 0.0
        """What the sum of the gradients is divided by."""

    async def once(self, request_id: str, call: Respond) -> pb.ForwardBackwardResponse:
        """The answer to the one and only run of `call` for this request."""
        return await self._replies.run(request_id, call)

    def refuse(self, what: str) -> None:
        """Refuse what cannot be done while gradients wait."""
        if self.calls:
            raise FailedPrecondition(
                f"{what} cannot be done now",
                where=f"run {self._run_id}",
                why=f"the gradients of {self.calls} ForwardBackward calls wait for their step",
                next_step="call OptimStep first",
            )

    def require(self) -> None:
        """Refuse a step on nothing."""
        if not self.calls:
            raise FailedPrecondition(
                "there are no gradients to step on",
                where=f"run {self._run_id}",
                why="no ForwardBackward call succeeded since the last step, or one that failed dropped them",
                next_step="call ForwardBackward first",
            )

    def check_kind(self, kind: str) -> None:
        """Refuse to add gradients that are divided by something else."""
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
        """One more call; its facts are means over `share` tokens or pairs."""
        self._kind = kind
        self.calls += 1
        self.units = max(self.units, units) if kind == WHOLE_UPDATES else self.units + units
        self.sample_ids += sample_ids
        self._share += share
        for name, value in facts.items():
            if name not in NOT_MEANS:
                self._sums[name] = self._sums.get(name, 0.0) + value * share

    def facts(self) -> dict[str, float]:
        """What the batches of all calls say about themselves, as one."""
        return {name: value / self._share for name, value in self._sums.items()}

    def clear(self, *, forget: bool) -> None:
        """No gradients are left; `forget` where no step was made of them, and their calls are to be sent again."""
        self._kind, self._share, self._sums = "", 0.0, {}
        self.calls, self.sample_ids, self.units = 0, [], 0.0
        if forget:
            self._replies = IdempotentCalls(KEPT_REPLIES)
