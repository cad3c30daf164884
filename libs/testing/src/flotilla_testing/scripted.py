"""Services without a wire or a process, for unit tests of their callers: answers and failures as written down."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from flotilla.common.v1 import weights_pb2
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_core.errors import FlotillaError


@dataclass
class Scripted:
    """A service whose next calls fail as written, and which remembers what it was asked."""

    answers: dict[str, Any]
    failures: dict[str, list[FlotillaError | None]] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """Calls that are answered only when their gate is set."""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, **_options: Any) -> Any:
            self.calls.append((method, request))
            await asyncio.sleep(0)
            if method in self.gates:
                await self.gates[method].wait()
            planned = self.failures.get(method, [])
            failure = planned.pop(0) if planned else None
            if failure is not None:
                raise failure
            return self.answers[method]

        return call

    def asked(self, method: str) -> list[Any]:
        """Return the requests of one method, in order."""
        return [request for name, request in self.calls if name == method]


@dataclass(eq=False)
class ScriptedReplica:
    """A generator as a pool hands it out."""

    registration: Registration
    stub: Scripted

    @property
    def name(self) -> str:
        """The slot's name."""
        return self.registration.name

    @property
    def instance_id(self) -> str:
        """Unique over restarts."""
        return self.registration.instance_id


def scripted_generator(name: str, life: int = 1) -> ScriptedReplica:
    """Return a generator that takes all weights."""
    answers = {
        "JoinWeightGroup": gen.JoinWeightGroupResponse(),
        "StageWeights": gen.StageWeightsResponse(),
        "CommitWeights": gen.CommitWeightsResponse(),
        "VerifyWeights": gen.VerifyWeightsResponse(),
        "GetWeightStatus": gen.GetWeightStatusResponse(),
        "AbortWeights": gen.AbortWeightsResponse(),
        "Sleep": gen.SleepResponse(freed_bytes=8),
        "Wake": gen.WakeResponse(),
    }
    return ScriptedReplica(Registration(name=name, instance_id=f"{name}-{life}"), Scripted(answers))


def scripted_trainer() -> Scripted:
    """Return a trainer that opens every group and publishes eight bytes."""
    digests = weights_pb2.WeightDigests(manifest_digest="m")
    return Scripted(
        {
            "OpenWeightGroup": train.OpenWeightGroupResponse(),
            "PublishWeights": train.PublishWeightsResponse(bytes=8, digests=digests),
            "CloseWeightGroup": train.CloseWeightGroupResponse(),
        }
    )
