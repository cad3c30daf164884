"""The asyncio client of one coordinator.

Invariants: every call has a deadline; every failure is a `flotilla_core.errors.FlotillaError`; run files are
resolved here (merged, checked, paths made absolute), so the coordinator never depends on where it runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla.coordinator.v1.run_pb2 import Plan, Run, RunEvent
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_client.discovery import find_coordinator
from flotilla_core import config, rpc
from flotilla_core.config.model import is_url
from flotilla_core.errors import Unavailable
from flotilla_core.ids import new_request_id

if TYPE_CHECKING:
    # A class of the typed stubs only.
    from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub
    from flotilla_client.loop import Loop
    from flotilla_core.trust import Credential

_CALL_S = 30.0
_SCALE_S = 300.0
_FETCH_S = 24 * 3600.0
_EXPORT_S = 600.0
_TIMELINE_IDLE_S = 60.0
# A step may take very long; that the coordinator lives is keepalive's business.
_WATCH_IDLE_S = 24 * 3600.0
_RECONNECT_S = 120.0


class Client:
    """Calls of one coordinator; `async with Client.find() as client`."""

    def __init__(self, address: str, *, credential: Credential | None = None) -> None:
        self.address = address
        self._channel = rpc.connect(address, credential=credential)
        self._stub: CoordinatorServiceAsyncStub = CoordinatorServiceStub(self._channel)

    @classmethod
    def find(
        cls,
        stack: str = "local",
        state_dir: str | Path = ".flotilla",
        coordinator: str | None = None,
        credential_file: str | Path | None = None,
    ) -> Self:
        """Return the coordinator of a stack on this host, or the one at an address.

        `credential_file` has the credential that calls show; by default it is the stack's own.
        """
        found = find_coordinator(stack, state_dir, coordinator, credential_file)
        return cls(found.address, credential=found.credential)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def plan_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Plan:
        """Report what a run would do, and why it would be refused; start nothing."""
        request = pb.PlanRunRequest(config_yaml=resolve_run(files, overrides))
        return (await rpc.unary(self._stub.PlanRun, request, timeout_s=_CALL_S)).plan

    async def start_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Run:
        """Returns as soon as the run is admitted."""
        request = pb.StartRunRequest(request_id=new_request_id(), config_yaml=resolve_run(files, overrides))
        return (await rpc.unary(self._stub.StartRun, request, timeout_s=_CALL_S)).run

    async def fork_run(
        self,
        run_id: str = "latest",
        overrides: Sequence[str] = (),
        *,
        checkpoint: str = "",
        fresh_optimizer: bool = False,
    ) -> Run:
        """Start a run from a checkpoint of another one: the named one, "best", or the newest.

        Its settings are those of the other run with `overrides`. Another `algorithm.type` brings its own preset.
        """
        source = await self.get_run_and_config(run_id)
        forked = pb.Fork(run_id=source.run.run_id, checkpoint=checkpoint, fresh_optimizer=fresh_optimizer)
        text = forked_config(source.config_yaml, f"run {source.run.run_id}", overrides)
        request = pb.StartRunRequest(request_id=new_request_id(), config_yaml=text, fork=forked)
        return (await rpc.unary(self._stub.StartRun, request, timeout_s=_CALL_S)).run

    async def open_loop(self, files: RunFiles, overrides: Sequence[str] = ()) -> Loop:
        """Start a run whose steps are made here, and return when it takes calls."""
        run = await self.start_run(files, [*overrides, "loop=client"])
        return await self.attach_loop(run.run_id)

    async def attach_loop(self, run_id: str = "latest") -> Loop:
        """Return a run that was opened before, by this client or another one."""
        # Loops alone need numpy, and the command line drives none.
        from flotilla_client.loop import Loop

        loop = Loop(self._channel, run_id, self.wait_run)
        await loop.open()
        return loop

    async def get_run(self, run_id: str = "latest") -> Run:
        """Return a run by its id, a unique prefix of it, or "latest"."""
        return (await self.get_run_and_config(run_id)).run

    async def get_run_and_config(self, run_id: str = "latest") -> pb.GetRunResponse:
        """Return the run and its resolved configuration."""
        return await rpc.unary(self._stub.GetRun, pb.GetRunRequest(run_id=run_id), timeout_s=_CALL_S)

    async def list_runs(self, limit: int = 20) -> list[Run]:
        """List the runs, the newest first."""
        answer = await rpc.unary(self._stub.ListRuns, pb.ListRunsRequest(limit=limit), timeout_s=_CALL_S)
        return list(answer.runs)

    async def watch_run(
        self, run_id: str = "latest", after_sequence: int = 0, *, tell: Callable[[str], None] | None = None
    ) -> AsyncGenerator[RunEvent]:
        """Past events, then live ones, until the run has ended; continues after a coordinator restart.

        `tell` hears when the coordinator goes away and when it is back.
        """
        say = tell or (lambda _: None)
        run_id = (await self.get_run(run_id)).run_id
        while True:
            request = pb.WatchRunRequest(run_id=run_id, after_sequence=after_sequence)
            events = rpc.server_stream(self._stub.WatchRun, request, idle_timeout_s=_WATCH_IDLE_S)
            try:
                async with aclosing(events):
                    async for answer in events:
                        after_sequence = answer.event.sequence
                        yield answer.event
                return
            except Unavailable:
                say(f"the coordinator does not answer; waiting up to {_RECONNECT_S:.0f} s for it")
                # It may be restarting: raises when it does not come back.
                await rpc.unary(
                    self._stub.GetRun, pb.GetRunRequest(run_id=run_id), timeout_s=_RECONNECT_S, attempts=1000
                )
                say("the coordinator is back")

    async def wait_run(self, run_id: str = "latest") -> Run:
        """Return the run after it has ended."""
        run_id = (await self.get_run(run_id)).run_id
        async for _ in self.watch_run(run_id):
            pass
        return await self.get_run(run_id)

    async def stop_run(self, run_id: str = "latest", reason: str = "") -> Run:
        """Ends after the step that is under way."""
        request = pb.StopRunRequest(run_id=run_id, request_id=new_request_id(), reason=reason)
        return (await rpc.unary(self._stub.StopRun, request, timeout_s=_CALL_S)).run

    async def pause_run(self, run_id: str = "latest") -> Run:
        """Begins no step after the one that is under way, and keeps the fleet."""
        request = pb.PauseRunRequest(run_id=run_id, request_id=new_request_id())
        return (await rpc.unary(self._stub.PauseRun, request, timeout_s=_CALL_S)).run

    async def set_run(self, run_id: str, changes: Sequence[str]) -> Run:
        """Change settings of the run (`key.path=value`) from its next step on."""
        request = pb.UpdateRunRequest(run_id=run_id, request_id=new_request_id(), overrides=changes)
        return (await rpc.unary(self._stub.UpdateRun, request, timeout_s=_CALL_S)).run

    async def resume_run(self, run_id: str = "latest", checkpoint: str = "") -> Run:
        """Continue a paused run, or an ended one from a checkpoint: the named one, or the newest good one.

        `run_id` may be a place in object storage to which checkpoints of a run were copied.
        """
        request = pb.ResumeRunRequest(run_id=run_id, request_id=new_request_id(), checkpoint=checkpoint)
        timeout_s = _FETCH_S if is_url(run_id) else _CALL_S
        return (await rpc.unary(self._stub.ResumeRun, request, timeout_s=timeout_s)).run

    async def list_services(self) -> list[pb.Service]:
        """Everything in the registry."""
        answer = await rpc.unary(self._stub.ListServices, pb.ListServicesRequest(), timeout_s=_CALL_S)
        return list(answer.services)

    async def drain_replica(self, replica: str) -> pb.Service:
        """No more work for a replica, by name or instance id; what it has it ends, its process stays."""
        request = pb.DrainReplicaRequest(request_id=new_request_id(), replica=replica)
        return (await rpc.unary(self._stub.DrainReplica, request, timeout_s=_CALL_S)).service

    async def show_weights(self, run_id: str = "") -> pb.ShowWeightsResponse:
        """Report the weights of trainer and generators of a run; without a name, of the run that began first."""
        request = pb.ShowWeightsRequest(run_id=run_id)
        return await rpc.unary(self._stub.ShowWeights, request, timeout_s=_CALL_S)

    async def list_samples(
        self,
        run_id: str = "latest",
        *,
        step: int | None = None,
        state: pb.SampleState.ValueType = pb.SAMPLE_STATE_UNSPECIFIED,
        limit: int = 100,
        page_token: str = "",
        messages: bool = True,
    ) -> pb.ListSamplesResponse:
        """One page of samples, as the ledger and the run directory have them; episodes without or with `messages`."""
        request = pb.ListSamplesRequest(
            run_id=run_id,
            step=step,
            state=state,
            limit=limit,
            page_token=page_token,
            without_messages=not messages,
        )
        return await rpc.unary(self._stub.ListSamples, request, timeout_s=_CALL_S)

    async def export_run(self, run_id: str = "latest") -> list[Path]:
        """Write metrics and samples as Parquet files into the run directory, and return their paths there."""
        request = pb.ExportRunRequest(run_id=run_id, request_id=new_request_id())
        answer = await rpc.unary(self._stub.ExportRun, request, timeout_s=_EXPORT_S)
        return [Path(file) for file in answer.files]

    async def timeline(self, run_id: str = "latest", *, step: int | None = None) -> AsyncGenerator[bytes]:
        """Chrome trace JSON in chunks."""
        request = pb.QueryTimelineRequest(run_id=run_id, step=step)
        chunks = rpc.server_stream(self._stub.QueryTimeline, request, idle_timeout_s=_TIMELINE_IDLE_S)
        async with aclosing(chunks):
            async for answer in chunks:
                yield answer.chunk

    async def scale(self, kind: ServiceKind.ValueType, replicas: int) -> list[ProcessStatus]:
        """Replicas of a kind; returns when they are as wanted."""
        request = pb.ScaleServiceRequest(request_id=new_request_id(), kind=kind, replicas=replicas)
        return list((await rpc.unary(self._stub.ScaleService, request, timeout_s=_SCALE_S)).processes)


RunFiles = str | Path | Iterable[str | Path]


def resolve_run(files: RunFiles, overrides: Sequence[str] = ()) -> str:
    """One run configuration, as YAML: files merged left to right, overrides applied, paths absolute."""
    paths = [files] if isinstance(files, str | Path) else list(files)
    return config.dump_yaml(config.load(config.RunConfig, paths, overrides, resolve_paths=True))


def forked_config(text: str, source: str, overrides: Sequence[str]) -> str:
    """Return the configuration of a run with overrides, whose paths start at the current folder."""
    if any(one.partition("=")[0].strip() == "algorithm.type" for one in overrides):
        # The sections of the other algorithm are written out, and none of them is asked for.
        overrides = ["algorithm={}", *overrides]
    return config.dump_yaml(
        config.load_text(config.RunConfig, text, source=source, overrides=overrides, resolve_paths=True)
    )
