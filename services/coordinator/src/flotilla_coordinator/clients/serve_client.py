"""From the beginning to the end of a run whose steps a client makes."""

from __future__ import annotations

from flotilla_coordinator.clients.client_loop import ClientLoop
from flotilla_coordinator.runs.active import ActiveRun
from flotilla_coordinator.runs.beginning import Beginning, begin
from flotilla_core import telemetry
from flotilla_core.telemetry import names


async def serve_client(loop: ClientLoop, beginning: Beginning, active: ActiveRun) -> None:
    """Begin as the built-in loop does, take the client's calls, and leave what such a run leaves."""
    run = loop.run
    with telemetry.span(names.RL_LOOP, attributes={names.RUN_ID: run.run_id}):
        await begin(run, beginning)
        with run.phase("sync"):
            await run.sync.publish(run.policy.version)
        active.opened.set()
        try:
            silence = await loop.serve()
        finally:
            await loop.close()
        if silence:
            active.request_stop(silence)
        if run.config.export_final:
            await run.export()
