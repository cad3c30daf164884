"""The discovery of the coordinator.

The token is where the stack's file says, or, without a launcher, where the coordinator says that it has it.
Order: the address that is given, the environment variable FLOTILLA_COORDINATOR, what the coordinator announced
in the stack's directory, what the launcher reserved for it. Where this host has no address of the coordinator, the
error says how a command runs beside it. The token: the file that is given, that of the environment
variable FLOTILLA_TOKEN_FILE, the stack's own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_core.config import BindConfig, StackConfig, load
from flotilla_core.errors import Unavailable
from flotilla_core.trust import Token, TokenFile

ENVIRONMENT_VARIABLE = "FLOTILLA_COORDINATOR"
TOKEN_FILE_VARIABLE = "FLOTILLA_TOKEN_FILE"


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address and the token with which to call the coordinator."""

    address: str
    token: Token = field(repr=False)
    """The secret of the stack, or a token with a role, which signs calls."""


def find_coordinator(
    stack: str = "local",
    state_dir: str | Path = ".flotilla",
    coordinator: str | None = None,
    token_file: str | Path | None = None,
    bind: BindConfig | None = None,
) -> CoordinatorAddress:
    """Raises Unavailable when nothing says where it is.

    `bind` says where token and certificates are on a host on which the stack was not started.
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
    announced_token = _value(announced, "token_file")
    if bind is None and announced_token:
        bind = BindConfig(token_file=Path(announced_token))
    if os.access(stack_file, os.R_OK):
        bind = load(StackConfig, [stack_file]).bind
    try:
        return CoordinatorAddress(address, token_of_caller(bind or BindConfig(), directory, token_file))
    except Unavailable as error:
        if not given:
            raise
        raise Unavailable(
            f"there is no token for the coordinator at {address}",
            where=str(directory.absolute()),
            why=f"calls are signed with the token of stack {stack!r}, which is not here",
            next_step=error.next_step,
        ) from None


def token_of_caller(bind: BindConfig, directory: Path, token_file: str | Path | None = None) -> Token:
    """Return the token by which this process calls the services of the stack whose files are in `directory`."""
    given = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    return TokenFile(Path(given), tls=bind.tls) if given else TokenFile.of_stack(bind, directory)


def _value(path: Path, key: str) -> str:
    try:
        return str(json.loads(path.read_text()).get(key, ""))
    except (OSError, ValueError):
        return ""
