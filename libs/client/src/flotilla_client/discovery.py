"""The discovery of the coordinator.

Order: the address that is given, the environment variable FLOTILLA_COORDINATOR, what the coordinator announced
in the stack's directory, what the launcher reserved for it. Where this host has no address of the coordinator, the
error says how a command runs beside it. The credential: the file that is given, that of the environment variable
FLOTILLA_CREDENTIAL_FILE, the one that the stack's file names, the one that the coordinator has, the stack's own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_core.config import BindConfig, StackConfig, load
from flotilla_core.errors import Unavailable
from flotilla_core.trust import Credential

ENVIRONMENT_VARIABLE = "FLOTILLA_COORDINATOR"
CREDENTIAL_FILE_VARIABLE = "FLOTILLA_CREDENTIAL_FILE"


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address and the credential with which to call the coordinator."""

    address: str
    credential: Credential = field(repr=False)
    """The credential of the stack, or one with a role."""


def find_coordinator(
    stack: str = "local",
    state_dir: str | Path = ".flotilla",
    coordinator: str | None = None,
    credential_file: str | Path | None = None,
    bind: BindConfig | None = None,
) -> CoordinatorAddress:
    """Raises Unavailable when nothing says where it is.

    `bind` says where the credential is on a host on which the stack was not started.
    """
    directory = Path(state_dir) / stack
    announced = directory / "instances" / "coordinator.json"
    given = coordinator or os.environ.get(ENVIRONMENT_VARIABLE)
    if not given and (reach := _value(directory / "placed.json", "reach")):
        raise Unavailable(
            f"the coordinator of stack {stack!r} is in a cluster, and this host has no address of it",
            where=str(directory.absolute()),
            next_step=f"run the command beside it: {reach} COMMAND",
        )
    address = given or _value(announced, "address")
    address = address or _value(directory / "launcher.json", "otlp").removeprefix("https://")
    if not address:
        raise Unavailable(
            f"stack {stack!r} is not running",
            where=str(directory.absolute()),
            why="no coordinator has announced itself there",
            next_step="start it with `flotilla up`, or name a coordinator by --coordinator HOST:PORT or "
            f"{ENVIRONMENT_VARIABLE}",
        )
    stack_file = directory / "stack.yaml"
    announced_file = _value(announced, "credential_file")
    if bind is None and announced_file:
        bind = BindConfig(credential_file=Path(announced_file))
    held = credential_file or os.environ.get(CREDENTIAL_FILE_VARIABLE)
    if not held and os.access(stack_file, os.R_OK):
        bind = load(StackConfig, [stack_file]).bind
    try:
        return CoordinatorAddress(address, credential_of_caller(bind or BindConfig(), directory, held))
    except Unavailable as error:
        if not given:
            raise
        raise Unavailable(
            f"there is no credential for the coordinator at {address}",
            where=str(directory.absolute()),
            why=f"callers show the credential of stack {stack!r} or one with a role, and neither is here",
            next_step=error.next_step,
        ) from None


def credential_of_caller(
    bind: BindConfig, directory: Path, credential_file: str | Path | None = None
) -> Credential:
    """Return the credential by which this process calls the services of the stack whose files are in `directory`."""
    given = credential_file or os.environ.get(CREDENTIAL_FILE_VARIABLE)
    credential = Credential(Path(given)) if given else Credential.of_stack(bind, directory)
    credential.current()  # One that cannot be used is told before anybody is called.
    return credential


def _value(path: Path, key: str) -> str:
    try:
        return str(json.loads(path.read_text()).get(key, ""))
    except (OSError, ValueError):
        return ""
