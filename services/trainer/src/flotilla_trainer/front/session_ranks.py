"""Send the work of one session to the ranks, and put their scores in the order of the tokens.

Invariants: callers that read or change weights hold `exclusive`; a session that has ended sends nothing any more;
micro-batches that exceed the memory of a rank are halved, with a notice, for the rest of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from flotilla.common.v1.operate_pb2 import Activity
from flotilla_core.config import BatchingConfig
from flotilla_core.errors import DeadlineExceeded, Exhausted, FlotillaError
from flotilla_core.logger import get_logger
from flotilla_core.service import Activities
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.front.session_settings import layout
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.settings import SMALLEST_BUDGET

logger = get_logger()

OUT_OF_MEMORY = "OutOfMemoryError"
"""The name of torch's error, which is in the last line of the log of a rank that ended by it."""
SECOND = 2

T = TypeVar("T")


class SessionRanks:
    """The access of one session to the gang."""

    def __init__(self, run_id: str, batching: BatchingConfig, gang: Gang, activities: Activities) -> None:
        self.run_id = run_id
        self._batching = batching
        self.budget = batching.microbatch_budget
        """The most tokens of a micro-batch now."""
        self._gang = gang
        self._activities = activities
        self._over: FlotillaError | None = None
        self.exclusive = asyncio.Lock()

    def end(self, why: FlotillaError) -> None:
        """Send no more work of this session to the ranks; a command that already runs is finished."""
        self._over = self._over or why

    def check_open(self) -> None:
        """Refuse work for a session that has ended."""
        if self._over is not None:
            raise self._over.again()

    async def settled(self) -> None:
        """Wait until no work of this session is in progress."""
        limit_s = self._gang.slow_timeout_s
        try:
            async with asyncio.timeout(limit_s), self.exclusive:
                return
        except TimeoutError:
            raise DeadlineExceeded(
                "the session cannot be closed",
                where=f"run {self.run_id}",
                why=f"waited {limit_s:g} s for its last command; " + "; ".join(self._gang.phases()),
                next_step="close it again; the watch names a rank that hangs and replaces the gang",
            ) from None

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model that the ranks hold."""
        facts = self._gang.facts
        return ModelLimits(facts["vocabulary"], facts["max_sequence_tokens"])

    @property
    def packing_refusal(self) -> str:
        """The reason why sequences of the model cannot be packed; empty where they can."""
        refusal: str = self._gang.facts["packing_refusal"]
        return refusal

    def doing(self, what: str) -> AbstractContextManager[Activity]:
        """Show `what` as an activity of this run inside the block."""
        return self._activities.doing(what, run_id=self.run_id)

    def layout(self) -> Layout:
        """Return how work is divided among the lanes."""
        return replace(layout(self._batching, self._gang.facts, self._gang.lanes), budget=self.budget)

    def pack(self, sequences: Sequences) -> list[list[MicroBatch]]:
        """Return the micro-batches of each lane."""
        return pack(sequences, self.layout())

    async def command(self, kind: str, *arguments: Any, **options: Any) -> list[Frame]:
        """Send every rank the same command."""
        # This check is here and not where the work began: a batch takes time to prepare, and no command of this
        # session may follow those of the next session.
        self.check_open()
        return await self._gang.command(kind, *arguments, **options)

    async def fitted(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Lay work out and do it; again with micro-batches of half the size for as long as they exceed the memory."""
        while True:
            try:
                return await attempt()
            except Exhausted as error:
                if self.budget < 2 * SMALLEST_BUDGET:
                    raise
                self.shrink(self.budget // 2, error.why)

    def shrink(self, budget: int, why: str) -> None:
        """Give micro-batches at most so many tokens from now on, and say so."""
        if budget >= self.budget:
            return
        self.budget = budget
        logger.warning(
            "smaller micro-batches from now on", run_id=self.run_id, tokens_per_microbatch=budget, why=why
        )

    async def work(self, kind: str, packed: list[list[MicroBatch]], fields: dict[str, Any]) -> list[Frame]:
        """Let every lane do its micro-batches; return the answers of the first rank of each."""
        width = self._gang.lane_width
        answers = await self.command(
            kind,
            fields,
            [arrays for batches in packed for arrays in [_arrays(batches)] * width],
            per_rank=[
                {"idle": [batch.idle for batch in batches]} for batches in packed for _ in range(width)
            ],
        )
        return answers[::width]

    async def scores(
        self,
        packed: list[list[MicroBatch]],
        count: int,
        *,
        temperature: float,
        top_k: int = 0,
        reference: bool = False,
        squares: bool = False,
        in_float32: bool = False,
    ) -> dict[str, Array]:
        """Return scores of `count` tokens, in order, under the policy or the one that the session started from."""
        fields = {
            "temperature": temperature,
            "chunk_tokens": self._batching.logprob_chunk_tokens,
            "top_k": top_k,
            "reference": reference,
            "squares": squares,
            "in_float32": in_float32,
        }
        return _in_place(await self.work("score", packed, fields), packed, count)

    async def values(self, packed: list[list[MicroBatch]], count: int) -> dict[str, Array]:
        """Return the values of `count` tokens, in order, by a critic."""
        return _in_place(await self.work("values", packed, {}), packed, count)


class MemoryLosses:
    """The gangs that runs lost because a rank ran out of memory, so that the same cause does not end them again.

    After the first such loss a run gets micro-batches of half the tokens. After the second, and where half of them are
    below SMALLEST_BUDGET, its session is refused with the keys to change, until the run asks for smaller micro-batches
    than those that were lost.
    """

    def __init__(self) -> None:
        self._budgets: dict[str, list[int]] = {}
        """The tokens of a micro-batch at each loss."""

    def note(self, run_id: str, budget: int, error: FlotillaError) -> None:
        """Count the loss of a gang, if it was one of memory."""
        if OUT_OF_MEMORY in error.why:
            self._budgets.setdefault(run_id, []).append(budget)

    def allowed(self, run_id: str, asked: int) -> int:
        """Return the tokens that a micro-batch of a new session may have; raise if there is no use in another one."""
        budgets = self._budgets.get(run_id, [])
        if not budgets or asked < budgets[-1]:
            return asked
        smallest = budgets[-1] < 2 * SMALLEST_BUDGET
        if len(budgets) >= SECOND or smallest:
            raise Exhausted(
                f"the ranks ran out of memory {len(budgets)} times"
                if budgets[1:]
                else "a rank ran out of memory",
                where="batching.tokens_per_microbatch",
                why=f"the last time with {budgets[-1]} tokens in a micro-batch"
                + (", so few that other things take the memory" if smallest else ""),
                next_step="set batching.activation_checkpointing to true or optimizer.offload, or raise trainer.nproc"
                if smallest
                else f"set it below {budgets[-1]}, or set batching.activation_checkpointing to true",
            )
        return budgets[-1] // 2


def _arrays(batches: list[MicroBatch]) -> dict[str, Array]:
    return {name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()}


def _in_place(answers: list[Frame], packed: list[list[MicroBatch]], count: int) -> dict[str, Array]:
    """Return the lanes' scores in the order of the scored tokens."""
    result: dict[str, Array] = {}
    for answer, batches in zip(answers, packed, strict=True):
        places = np.concatenate([batch.places for batch in batches])
        for name, values in answer.arrays.items():
            whole = result.setdefault(name, np.empty((count, *values.shape[1:]), values.dtype))
            whole[places] = values
    return result
