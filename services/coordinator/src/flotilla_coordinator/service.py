"""The coordinator as a service: ledger, span store, fleet and runs under one server.

Invariants: the span store and the ledger are opened before the port, and closed after every run has ended; no torch, no
vllm and no transformers is imported anywhere below this package.
"""

from __future__ import annotations

import asyncio

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from flotilla.common.v1 import operate_pb2
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.coordinator.v1 import coordinator_pb2_grpc, loop_pb2_grpc
from flotilla_coordinator.api.coordinator_servicer import CoordinatorServicer
from flotilla_coordinator.api.loop_servicer import LoopServicer
from flotilla_coordinator.fleet.fleet import Fleet, keep_in_view
from flotilla_coordinator.fleet.launcher import LauncherLink
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.writer import BEAT_S, Owner
from flotilla_coordinator.retention import Retention
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.timeline.store import SpanStore, TraceReceiver
from flotilla_core.bus import EventStream
from flotilla_core.config import dump_yaml
from flotilla_core.errors import FlotillaError, StaleVersion
from flotilla_core.files import write_atomically
from flotilla_core.logger import get_logger
from flotilla_core.model_folder import model_folder, tokenizer_digest
from flotilla_core.rpc import RpcServer
from flotilla_core.service import Host
from flotilla_core.service.model import offer_models

log = get_logger(__name__)


class Coordinator:
    """Implements `flotilla_core.service.Service`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ledger = Ledger.open(host.state_dir / "ledger.sqlite", Owner.of_this_process(host.instance_id))
        self._watching: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        offer_models(host)
        self._spans = SpanStore(host.state_dir / "spans.sqlite")
        self._fleet = Fleet(host, lambda: not self._ledger.lost)
        self._runs = Runs(host, self._fleet, self._ledger, EventStream(host.bus))
        self._retention = Retention(
            host.stack.coordinator, self._ledger, self._spans, host.state_dir / "runs", self._runs.change_lock
        )

    def add_to(self, server: RpcServer) -> None:
        """Add the coordinator's services and the OTLP receiver."""
        servicer = CoordinatorServicer(
            self._runs,
            self._fleet,
            self._ledger,
            self._spans,
            LauncherLink(self._host.state_dir, self._host.stack.ready_timeout_s),
        )
        server.add(
            coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
            servicer,
            "flotilla.coordinator.v1.CoordinatorService",
        )
        server.add(
            loop_pb2_grpc.add_LoopServiceServicer_to_server,
            LoopServicer(self._runs),
            "flotilla.coordinator.v1.LoopService",
        )
        server.add(
            trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
            TraceReceiver(self._spans),
            "opentelemetry.proto.collector.trace.v1.TraceService",
        )

    async def start(self) -> None:
        """Follow the fleet, then continue the runs that an earlier coordinator left."""
        self._describe_stack()
        self._watching = asyncio.create_task(keep_in_view(self._fleet, self._host), name="fleet watch")
        self._beating = asyncio.create_task(self._beat(), name="ledger beat")
        await self._runs.recover()
        self._keeping = asyncio.create_task(self._retention.keep(), name="retention")

    def _describe_stack(self) -> None:
        """Write the stack's settings where commands and the SDK look for them, unless a launcher has."""
        directory = self._host.state_dir
        if not (directory / "launcher.json").exists():
            write_atomically(directory / "stack.yaml", dump_yaml(self._host.stack))

    def describe(self, registration: Registration) -> None:
        """Add the digest of the coordinator's tokenizer."""
        registration.tokenizer_digest = tokenizer_digest(model_folder(self._host.stack.model))

    async def check(self) -> list[Finding]:
        """Return no checks beyond those of the host."""
        return []

    async def dump_stacks(self) -> list[operate_pb2.ProcessStacks]:
        """Return nothing, because the coordinator has no child processes."""
        return []

    async def drain(self, grace_s: float) -> None:
        """End all runs, and record that."""
        await self._runs.close()

    async def stop(self) -> None:
        """Close in the reverse order of opening."""
        await self._runs.close()
        for task in (self._beating, self._keeping, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._fleet.close()
        self._ledger.close()
        self._spans.close()

    async def _beat(self) -> None:
        """Renew the ownership of the ledger; end this coordinator once another one owns it."""
        while True:
            try:
                await self._ledger.beat()
            except StaleVersion as error:
                return self._host.failed(error)
            except FlotillaError as error:  # a full disk: writes that matter report it
                log.warning("the ledger was not written", error=str(error))
            await asyncio.sleep(BEAT_S)
