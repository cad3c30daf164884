"""The processes of a stack in the output of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import Service
    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus

COLUMNS = ("NAME", "KIND", "STATE", "PID", "ADDRESS", "RESTARTS", "SINCE", "VERSION")


def process_json(process: ProcessStatus, service: Service | None = None) -> dict[str, Any]:
    """One process in the output of `up`, `ps` and `scale`."""
    return {
        "name": process.name,
        "kind": kind_of(process),
        "state": state_of(process),
        "pid": process.pid or None,
        "address": process.address or None,
        "instance_id": process.instance_id or None,
        "restarts": process.restarts,
        "since": process.since.ToJsonString(),
        "log": process.log_path or None,
        "error": process.error or None,
        "policy_version": _version(service),
        "run_id": service.run_id or None if service is not None else None,
    }


def process_row(process: ProcessStatus, service: Service | None = None) -> tuple[str, ...]:
    """The same as a line below COLUMNS."""
    from flotilla_coordinator.cli.output import age

    return (
        process.name,
        kind_of(process),
        state_of(process),
        str(process.pid or ""),
        process.address,
        str(process.restarts),
        age(process.since),
        _version(service) or "",
    )


def kind_of(process: ProcessStatus) -> str:
    """`generator`, `trainer`, ..., or `nats`."""
    from flotilla_launch.placement import kind_name

    # Of all processes, NATS alone is no service of ours.
    return kind_name(process.kind) if process.kind else process.name


def state_of(process: ProcessStatus) -> str:
    """`ready` for PROCESS_STATE_READY."""
    from flotilla.launcher.v1.launcher_pb2 import ProcessState

    return ProcessState.Name(process.state).removeprefix("PROCESS_STATE_").lower()


def _version(service: Service | None) -> str | None:
    if service is None or not service.HasField("live_version"):
        return None
    from flotilla_coordinator.cli.output import version_text

    return version_text(service.live_version)
