"""The generators that the next weight group may have.

Invariants: one that reads the tokens in another way, or whose model has another shape, is refused for as long as its
process lives; one that failed comes back when it is healthy; whoever leaves is named to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.data.tokenizer import Tokenizer, of_same_tokenizer
from flotilla_coordinator.weights.members import GeneratorReplica
from flotilla_core.errors import FlotillaError, Mismatch
from flotilla_core.rpc import ReplicaPool

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub


class Candidates:
    """Those of one run; `spared` leaves out whom an evaluation holds."""

    def __init__(
        self,
        pool: ReplicaPool[GeneratorServiceAsyncStub],
        tokenizer: Tokenizer,
        model: Path | str,
        wait_limit_s: float,
        notice: Callable[[run_pb2.NoticeLevel.ValueType, str], None],
        spared: Callable[[list[GeneratorReplica]], list[GeneratorReplica]],
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._model = model
        self._wait_limit_s = wait_limit_s
        self._notice = notice
        self._spared = spared

    async def fitting(self) -> list[GeneratorReplica]:
        """At least one, by name; waits for it."""
        await self._pool.wait_for(1, self._wait_limit_s, "a generator")
        replicas = sorted(self._pool.replicas(), key=lambda replica: replica.name)
        return self._spared(of_same_tokenizer(replicas, self._tokenizer, self._model, self.evict))

    def evict(self, replica: GeneratorReplica, error: FlotillaError) -> None:
        """It failed, or will never fit."""
        if isinstance(error, Mismatch):  # it will not fit later either, however healthy it is
            self._pool.drain(replica.instance_id, str(error))
            self._notice(run_pb2.NOTICE_LEVEL_ERROR, f"{replica.name} is refused: {error}")
            return
        self._pool.eject(replica.instance_id, str(error))
        self._notice(run_pb2.NOTICE_LEVEL_WARNING, f"{replica.name} left the weight group: {error}")
