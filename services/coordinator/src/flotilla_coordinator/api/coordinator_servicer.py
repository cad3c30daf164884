"""Implements CoordinatorService.

Invariants: it has no state of its own; every call reads from, or acts on, `Runs`, the ledger, the span store or the
launcher. Calls that this release does not have answer UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from flotilla.launcher.v1 import launcher_pb2
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.fleet.launcher import LauncherLink
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.report import Exporter
from flotilla_coordinator.runs.events import all_events, past_events
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.timeline.store import SpanStore
from flotilla_coordinator.views.samples import list_samples
from flotilla_coordinator.views.timeline import trace

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(CoordinatorServiceServicer):
    """Answers the CLI, the SDK and dashboards."""

    def __init__(
        self, runs: Runs, fleet: Fleet, ledger: Ledger, spans: SpanStore, launcher: LauncherLink
    ) -> None:
        self._runs = runs
        self._fleet = fleet
        self._ledger = ledger
        self._spans = spans
        self._launcher = launcher
        self._exporter = Exporter()

    async def PlanRun(self, request: pb.PlanRunRequest, context: Context) -> pb.PlanRunResponse:
        """Check a run without starting it."""
        plan = await asyncio.to_thread(self._runs.plan, request.config_yaml)
        return pb.PlanRunResponse(plan=plan)

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.StartRunResponse:
        """Admit a run."""
        fork = request.fork if request.HasField("fork") else None
        run = await self._runs.start(request.config_yaml, request.request_id, fork)
        return pb.StartRunResponse(run=run)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Return one run with its configuration."""
        run = await self._runs.find(request.run_id)
        return pb.GetRunResponse(run=run, config_yaml=await self._runs.configuration(run.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """Return the runs, newest first."""
        return pb.ListRunsResponse(runs=await self._runs.list(request.limit))

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Context
    ) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream the events of a run until it has ended."""
        run = await self._runs.find(request.run_id)
        active = self._runs.active(run.run_id)
        after = request.after_sequence
        async for event in (
            past_events(run, after) if active is None else all_events(run, active.events, after)
        ):
            yield pb.WatchRunResponse(event=event)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        """End a run."""
        return pb.StopRunResponse(run=await self._runs.stop(request.run_id, request.reason))

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Context) -> pb.ListSamplesResponse:
        """Return one page of samples."""
        run = await self._runs.find(request.run_id)
        directory = RunDirectory(Path(run.directory))
        return await asyncio.to_thread(list_samples, self._ledger.path, run.run_id, directory, request)

    async def ExportRun(self, request: pb.ExportRunRequest, context: Context) -> pb.ExportRunResponse:
        """Export metrics and samples as Parquet."""
        run = await self._runs.find(request.run_id)
        files = await self._exporter.export(Path(run.directory))
        return pb.ExportRunResponse(files=[str(file) for file in files])

    async def ListServices(
        self, request: pb.ListServicesRequest, context: Context
    ) -> pb.ListServicesResponse:
        """Return all services in the registry."""
        return pb.ListServicesResponse(services=self._runs.services())

    async def DrainReplica(
        self, request: pb.DrainReplicaRequest, context: Context
    ) -> pb.DrainReplicaResponse:
        """Give a replica no more work."""
        return pb.DrainReplicaResponse(service=self._runs.service(await self._fleet.drain(request.replica)))

    async def ShowWeights(self, request: pb.ShowWeightsRequest, context: Context) -> pb.ShowWeightsResponse:
        """Return the weights that each generator of the run holds."""
        active_runs = {
            active.run_id: active for active in self._runs.active_runs() if active.context is not None
        }
        run_id = (
            (await self._runs.find(request.run_id)).run_id if request.run_id else next(iter(active_runs), "")
        )
        reply = pb.ShowWeightsResponse(run_ids=active_runs)
        active = active_runs.get(run_id)
        if active is not None and active.context is not None:
            reply.run_id = run_id
            reply.policy_version.CopyFrom(active.context.policy.version.to_proto())
            reply.generators.extend(held.to_proto() for held in active.context.sync.serving.held())
        return reply

    async def ScaleService(
        self, request: pb.ScaleServiceRequest, context: Context
    ) -> pb.ScaleServiceResponse:
        """Pass the request to the launcher."""
        reply = await self._launcher.scale(
            launcher_pb2.ScaleRequest(
                request_id=request.request_id, kind=request.kind, replicas=request.replicas
            )
        )
        return pb.ScaleServiceResponse(processes=reply.processes)

    async def QueryTimeline(
        self, request: pb.QueryTimelineRequest, context: Context
    ) -> AsyncIterator[pb.QueryTimelineResponse]:
        """Stream the spans of a run as Chrome trace JSON."""
        run = await self._runs.find(request.run_id)
        step = request.step if request.HasField("step") else None
        for chunk in await asyncio.to_thread(lambda: [*trace(self._spans.path, run.run_id, step)]):
            yield pb.QueryTimelineResponse(chunk=chunk)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.PauseRunResponse:
        """Pause a run: it begins no further step."""
        return pb.PauseRunResponse(run=await self._runs.pause(request.run_id))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.ResumeRunResponse:
        """End a pause, or continue a run from a checkpoint."""
        run = await self._runs.resume(request.run_id, request.checkpoint, request.request_id)
        return pb.ResumeRunResponse(run=run)

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        """Continue a run with other settings."""
        return pb.UpdateRunResponse(run=await self._runs.configure(request.run_id, request.overrides))
