"""The same client without asyncio: every method waits.

Generated from `Client` by scripts/generate_sync_client.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.run_pb2 import Plan, Run, RunEvent
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_client.client import RunFiles
from flotilla_client.waiting import WaitingClient

if TYPE_CHECKING:
    from flotilla_client.loop import Loop
    from flotilla_client.synchronous_loop import SyncLoop


def connect(
    stack: str = "local",
    state_dir: str | Path = ".flotilla",
    coordinator: str | None = None,
    credential_file: str | Path | None = None,
) -> SyncClient:
    """A client of the stack's coordinator; use it in a `with` block or call `close`."""
    return SyncClient(stack, state_dir, coordinator, credential_file)


class SyncClient(WaitingClient):
    """Calls of one coordinator, each of which waits for its answer."""

    def _synchronous(self, loop: Loop) -> SyncLoop:
        # Loops alone need numpy.
        from flotilla_client.synchronous_loop import SyncLoop

        return SyncLoop(loop, self._wait, lambda reason: self.stop_run(loop.run_id, reason))

    def plan_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Plan:
        """Report what a run would do, and why it would be refused; start nothing."""
        return self._wait(self._client.plan_run(files, overrides))

    def start_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Run:
        """Returns as soon as the run is admitted."""
        return self._wait(self._client.start_run(files, overrides))

    def fork_run(
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
        return self._wait(
            self._client.fork_run(run_id, overrides, checkpoint=checkpoint, fresh_optimizer=fresh_optimizer)
        )

    def open_loop(self, files: RunFiles, overrides: Sequence[str] = ()) -> SyncLoop:
        """Start a run whose steps are made here, and return when it takes calls."""
        return self._synchronous(self._wait(self._client.open_loop(files, overrides)))

    def attach_loop(self, run_id: str = "latest") -> SyncLoop:
        """Return a run that was opened before, by this client or another one."""
        return self._synchronous(self._wait(self._client.attach_loop(run_id)))

    def get_run(self, run_id: str = "latest") -> Run:
        """Return a run by its id, a unique prefix of it, or "latest"."""
        return self._wait(self._client.get_run(run_id))

    def list_runs(self, limit: int = 20) -> list[Run]:
        """List the runs, the newest first."""
        return self._wait(self._client.list_runs(limit))

    def watch_run(self, run_id: str = "latest", after_sequence: int = 0) -> Iterator[RunEvent]:
        """Past events, then live ones, until the run has ended; continues after a coordinator restart."""
        return self._iterate(self._client.watch_run(run_id, after_sequence))

    def wait_run(self, run_id: str = "latest") -> Run:
        """Return the run after it has ended."""
        return self._wait(self._client.wait_run(run_id))

    def stop_run(self, run_id: str = "latest", reason: str = "") -> Run:
        """Ends after the step that is under way."""
        return self._wait(self._client.stop_run(run_id, reason))

    def pause_run(self, run_id: str = "latest") -> Run:
        """Begins no step after the one that is under way, and keeps the fleet."""
        return self._wait(self._client.pause_run(run_id))

    def set_run(self, run_id: str, changes: Sequence[str]) -> Run:
        """Change settings of the run (`key.path=value`) from its next step on."""
        return self._wait(self._client.set_run(run_id, changes))

    def resume_run(self, run_id: str = "latest", checkpoint: str = "") -> Run:
        """Continue a paused run, or an ended one from a checkpoint: the named one, or the newest good one.

        `run_id` may be a place in object storage to which checkpoints of a run were copied.
        """
        return self._wait(self._client.resume_run(run_id, checkpoint))

    def list_services(self) -> list[pb.Service]:
        """Everything in the registry."""
        return self._wait(self._client.list_services())

    def drain_replica(self, replica: str) -> pb.Service:
        """No more work for a replica, by name or instance id; what it has it ends, its process stays."""
        return self._wait(self._client.drain_replica(replica))

    def show_weights(self, run_id: str = "") -> pb.ShowWeightsResponse:
        """Report the weights of trainer and generators of a run; without a name, of the run that began first."""
        return self._wait(self._client.show_weights(run_id))

    def list_samples(
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
        return self._wait(
            self._client.list_samples(
                run_id, step=step, state=state, limit=limit, page_token=page_token, messages=messages
            )
        )

    def export_run(self, run_id: str = "latest") -> list[Path]:
        """Write metrics and samples as Parquet files into the run directory, and return their paths there."""
        return self._wait(self._client.export_run(run_id))

    def timeline(self, run_id: str = "latest", *, step: int | None = None) -> Iterator[bytes]:
        """Chrome trace JSON in chunks."""
        return self._iterate(self._client.timeline(run_id, step=step))

    def scale(self, kind: ServiceKind.ValueType, replicas: int) -> list[ProcessStatus]:
        """Replicas of a kind; returns when they are as wanted."""
        return self._wait(self._client.scale(kind, replicas))
