"""Scores for finished samples.

Invariants: an outcome is a value, an error or a timeout, and only a value is ever a reward; the loss of a
reward replica is repaired by asking another one, never by a score. A replica is lost when it is silent, never because
it is slow: it gives signs of life while samples wait, and holds each one to its own limit.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.rollouts.score_gathering import ScoreGathering, Take
from flotilla_core import ids, rpc, telemetry
from flotilla_core.config import LARGEST_REWARD, RewardTermConfig
from flotilla_core.errors import DeadlineExceeded, Unavailable
from flotilla_core.rpc import Load, ReplicaPool
from flotilla_core.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from flotilla.reward.v1.reward_pb2_grpc import RewardServiceAsyncStub


RIGHT_AT = 1.0
"""An answer that earns as much is right."""
MAX_CALLS = 5
SILENT_S = 40.0
"""Several signs of life of a reward replica, and as long as a connection may be silent."""


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: a finite total, or a failure that says why."""

    total: float | None
    failure: str = ""
    timed_out: bool = False
    terms: tuple[float, ...] = ()
    """What each reward gave by itself, in the order of the configuration."""


class Scorer:
    """Asks the reward service for one run."""

    def __init__(
        self,
        run_id: str,
        terms: tuple[RewardTermConfig, ...],
        pool: ReplicaPool[RewardServiceAsyncStub],
        wait_limit_s: float,
    ) -> None:
        self._run_id = run_id
        self._pool = pool
        self._wait_limit_s = wait_limit_s
        self._specs = [_spec(term) for term in terms]
        self._gathering = ScoreGathering(self._scored)

    async def score(self, items: list[pb.ScoreItem]) -> dict[str, Outcome]:
        """One outcome for every item; without terms nobody is asked, and all of them are worth nothing."""
        if not self._specs:
            return {item.sample_id: Outcome(0.0) for item in items}
        return await self._gathering.outcomes(items)

    async def _scored(
        self, items: list[pb.ScoreItem], askers: list[SpanContext], take: Take[Outcome]
    ) -> None:
        missing = {item.sample_id: item for item in items}
        attributes: dict[str, str | int] = {names.RUN_ID: self._run_id, names.SAMPLES: len(items)}
        with telemetry.span(names.RL_REWARD, attributes=attributes, links=askers):
            for call in range(MAX_CALLS):
                load = Load(len(missing))
                replica = await self._pool.acquire(
                    load, timeout_s=self._wait_limit_s, what="a reward replica"
                )
                try:
                    await self._call(replica.stub, missing, take)
                except (Unavailable, DeadlineExceeded) as error:
                    self._pool.eject(replica.instance_id, str(error))
                    if call == MAX_CALLS - 1:
                        raise
                finally:
                    self._pool.release(replica, load)
                if not missing:
                    return
        for sample_id in missing:
            take(sample_id, Outcome(None, "the reward service returned no outcome"))

    async def _call(
        self, stub: RewardServiceAsyncStub, missing: dict[str, pb.ScoreItem], take: Take[Outcome]
    ) -> None:
        """Ask one replica; what it answers is missing no more."""
        request = pb.ScoreRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            items=missing.values(),
            rewards=self._specs,
        )
        # How long they wait behind those of other calls is nothing that this side can know.
        stream = rpc.server_stream(stub.Score, request, idle_timeout_s=SILENT_S)
        async with aclosing(stream) as replies:
            async for reply in replies:
                for outcome in reply.outcomes:
                    if missing.pop(outcome.sample_id, None) is not None:
                        take(outcome.sample_id, _outcome(outcome))


def _outcome(reply: pb.ScoreOutcome) -> Outcome:
    kind = reply.WhichOneof("outcome")
    if kind == "value" and abs(reply.value.total) <= LARGEST_REWARD:
        return Outcome(reply.value.total, terms=tuple(one.value for one in reply.value.components))
    if kind == "value":
        return Outcome(
            None, f"the reward is {reply.value.total}, and at most {LARGEST_REWARD:g} is taken either way"
        )
    if kind == "timeout":
        limit_s = reply.timeout.limit.ToNanoseconds() / 1e9
        return Outcome(None, f"{reply.timeout.reward} took longer than {limit_s:g} s", timed_out=True)
    return Outcome(None, f"{reply.error.reward}: {reply.error.message}")


def _spec(term: RewardTermConfig) -> pb.RewardSpec:
    parameters, timeout = Struct(), Duration()
    parameters.update(term.parameters)
    timeout.FromNanoseconds(int(term.timeout_s * 1e9))
    return pb.RewardSpec(reward=term.reward, weight=term.weight, parameters=parameters, timeout=timeout)
