"""The generator as the host runs it: an engine, its servicer, its end.

Invariant: READY means that the engine has decoded a request with logprobs; when the engine dies, so does the service,
and the launcher starts it again.
"""

from __future__ import annotations

import asyncio
from typing import cast

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.operate_pb2 import ProcessStacks
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.generator.v1 import generator_pb2, generator_pb2_grpc
from flotilla_core.errors import Unavailable
from flotilla_core.findings import failed, passed
from flotilla_core.model_folder import tokenizer_digest
from flotilla_core.roles import holds_judge
from flotilla_core.rpc import RpcServer
from flotilla_core.service import Host
from flotilla_core.transfer.folders import found_files, stamp_of
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import Engine
from flotilla_generator.engine.slowed import SlowedEngine
from flotilla_generator.servicer import GeneratorServicer
from flotilla_generator.weights import Phase

SERVICE_NAME = generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"].full_name


class GeneratorHostService:
    """One replica inside its process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._checkpoint = Checkpoint.read(host.stack.model)
        # Before they are loaded: what is written over them later was never held here.
        self._weights_stamp = _stamp(self._checkpoint) if holds_judge(host.name) else ""
        self._engine = _engine(host, self._checkpoint)
        self._servicer = GeneratorServicer(self._engine, host.activities)
        self._watch: asyncio.Task[None] | None = None

    def add_to(self, server: RpcServer) -> None:
        server.add(generator_pb2_grpc.add_GeneratorServiceServicer_to_server, self._servicer, SERVICE_NAME)

    async def start(self) -> None:
        await self._engine.start()
        run_id, _, version = self._host.stack.generator.boot_version.partition("/")
        if version:
            await self._servicer.weights.adopt(run_id, Version.parse(version))
        self._watch = asyncio.create_task(self._end_with_the_engine(), name="engine watch")
        self._servicer.open()

    def describe(self, registration: Registration) -> None:
        info = self._engine.info
        registration.weights_stamp = self._weights_stamp
        registration.tokenizer_digest = tokenizer_digest(self._checkpoint.folder)
        if info.required_tensors is not None:
            registration.model_digest = self._checkpoint.shape_digest
        registration.capacity["weight_workers"] = info.weight_workers
        registration.capacity["gpus"] = info.gpus
        registration.capacity["running_samples"] = self._host.stack.generator.max_running_samples
        registration.capacity["max_model_tokens"] = info.max_model_tokens
        registration.capacity["vocabulary_size"] = info.vocabulary_size
        for name, version in info.versions.items():
            registration.versions[name] = version

    async def check(self) -> list[Finding]:
        weights = self._servicer.weights
        held = f"version {weights.live}" if weights.live is not None else "its boot weights"
        serving = f"{'asleep, with' if self._servicer.sleep.asleep else 'serving'} {held}"
        if weights.phase is Phase.BROKEN:
            return [failed("weights", weights.error, "Sync a whole version, or restart the replica.")]
        return [passed("weights", serving)]

    async def dump_stacks(self) -> list[ProcessStacks]:
        return [
            ProcessStacks(process=name, pid=pid, text=text)
            for name, pid, text in await self._engine.worker_stacks()
        ]

    async def drain(self, grace_s: float) -> None:
        await self._servicer.close(grace_s)

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._engine.stop()

    async def _end_with_the_engine(self) -> None:
        why = await self._engine.wait_failed()
        self._host.failed(
            Unavailable(
                "the engine died", where=self._host.name, why=why, next_step="read the log of this replica"
            )
        )


def _stamp(checkpoint: Checkpoint) -> str:
    return stamp_of(found_files(checkpoint.folder))


def _engine(host: Host, checkpoint: Checkpoint) -> Engine:
    """Return the engine that the stack names; each is imported only where it is used."""
    config = host.stack.generator
    if config.engine == "sim":
        from flotilla_generator.engine.sim.engine import SimEngine

        return SimEngine(config, checkpoint)
    from flotilla_generator.engine.vllm.boot import CACHE
    from flotilla_generator.engine.vllm.engine import VllmEngine

    engine = VllmEngine(config, checkpoint, cache=host.state_dir / CACHE)
    return engine if config.slowed_by is None else cast("Engine", SlowedEngine(engine, config.slowed_by))
