"""The discovery of the coordinator.

Order: the address that is given, the environment variable FLOTILLA_COORDINATOR, what the coordinator announced
in the stack's directory, what the launcher reserved for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_core.config import BindConfig, StackConfig, load
from flotilla_core.errors import Unavailable
from flotilla_core.trust import read_token

ENVIRONMENT_VARIABLE = "FLOTILLA_COORDINATOR"


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address and the token with which to call the coordinator."""

    address: str
    token: str = field(repr=False)
    """The secret of the stack, which signs calls."""


def find_coordinator(
    stack: str = "local", state_dir: str | Path = ".flotilla", coordinator: str | None = None
) -> CoordinatorAddress:
    """Raises Unavailable when nothing says where it is."""
    directory = Path(state_dir) / stack
    given = coordinator or os.environ.get(ENVIRONMENT_VARIABLE)
    address = given or _value(directory / "instances" / "coordinator.json", "address")
    address = address or _value(directory / "launcher.json", "otlp")
    if not address:
        raise Unavailable(
            f"stack {stack!r} is not running",
            where=str(directory.absolute()),
            why="no coordinator has announced itself there",
            next_step="start it with `flotilla up`, or name a coordinator by --coordinator HOST:PORT or "
            f"{ENVIRONMENT_VARIABLE}",
        )
    stack_file = directory / "stack.yaml"
    bind = load(StackConfig, [stack_file]).bind if os.access(stack_file, os.R_OK) else BindConfig()
    try:
        return CoordinatorAddress(address, read_token(bind, directory))
    except Unavailable as error:
        if not given:
            raise
        raise Unavailable(
            f"there is no token for the coordinator at {address}",
            where=str(directory.absolute()),
            why=f"calls are signed with the token of stack {stack!r}, which is not here",
            next_step=error.next_step,
        ) from None


def _value(path: Path, key: str) -> str:
    try:
        return str(json.loads(path.read_text()).get(key, ""))
    except (OSError, ValueError):
        return ""
