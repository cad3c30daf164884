"""Implements `flotilla token`: credentials for people, programs and hosts, and a new one for the stack.

Invariant: a credential is written to a file that only its owner can read, or printed on stdout alone.
"""

from __future__ import annotations

import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flotilla_cli.options import Json, Stack, make_folder_of
from flotilla_cli.output import print_json, print_line, say
from flotilla_cli.stack import load_stack
from flotilla_core.config import StackConfig
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.files import make_private_folder
from flotilla_core.trust import Claims, write_secret
from flotilla_core.trust.authority import create_credential, make_credential, rotate
from flotilla_launch.paths import StackPaths

app = typer.Typer(
    help="Make credentials for people, programs and hosts; replace the stack's own.", no_args_is_help=True
)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Role(StrEnum):
    """The roles that a credential can have."""

    read = "read"
    run = "run"
    admin = "admin"
    service = "service"


@app.command()
def create(
    role: Annotated[
        Role,
        typer.Option(
            help="read looks; run also starts and steers runs; admin also changes the fleet; service is for hosts "
            "and Secrets of Kubernetes."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write it, mode 0600; - prints it."),
    ],
    name: Annotated[
        str, typer.Option(help="Who holds it, as errors and logs say: ana, ci@example. Not for a service.")
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default="never", help="For how long it is good: 90m, 12h, 30d."),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Make a credential, by the authority of the stack; no service has to be told of it."""
    config = load_stack(stack)
    directory = _own_directory(config)
    claims = _claims(role, name, expires)
    if claims is None:
        # The first one of a stack that is started elsewhere, for example on Kubernetes.
        make_private_folder(directory)
        make_credential(config.bind, directory)
    text = create_credential(directory, claims)
    is_printed = str(output) == "-"
    if not is_printed:
        make_folder_of(output)
        write_secret(output, text)
        use = "bind.credential_file" if claims is None else "--credential-file or FLOTILLA_CREDENTIAL_FILE"
        say(f"{output}: name it by {use}")
    if as_json:
        shown = {"credential": text} if is_printed else {"file": str(output)}
        ends_s = None if claims is None else claims.ends_s
        print_json({"role": role.value, "name": name, "expires_at": ends_s, **shown})
    elif is_printed:
        print_line(text.rstrip())


@app.command(name="rotate")
def rotate_authority(
    overlap: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long credentials of the old authority stay good; 0s ends them."
        ),
    ] = "10m",
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Replace the stack's authority and credential while everything runs; all others that it made end."""
    overlap_s = _seconds(overlap, "--overlap", least=0)
    file = rotate(_own_directory(load_stack(stack)), overlap_s)
    if as_json:
        print_json({"file": str(file), "overlap_s": overlap_s})
        return
    print_line(
        f"{file}: a new credential. In {overlap} all others of this stack end: make new ones for people and programs, "
        "and copy this file to the hosts that have the old one (pods: flotilla up; containers: flotilla down, then up)"
    )


def _own_directory(config: StackConfig) -> Path:
    """Return where the authority of the stack is; refuse a stack whose credential somebody else made."""
    if config.bind.credential_file is not None:
        raise FailedPrecondition(
            "the stack's credential is a file of yours",
            where=f"bind.credential_file {config.bind.credential_file}",
            why="another authority may have made it, which this command does not have",
            next_step="on the host where the stack was made, work with a stack file without this key; for "
            "certificates of another authority, have it make one",
        )
    return StackPaths.of(config.state_dir, config.name).directory


def _claims(role: Role, name: str, expires: str | None) -> Claims | None:
    """Return what the certificate says of its holder; None for one of the stack's own."""
    if role is Role.service:
        if name or expires is not None:
            raise InvalidRequest(
                "a service has neither a name nor an end of its own",
                where="--name, --expires",
                why="it stands for the whole stack, and is good until the next flotilla token rotate",
                next_step="leave both out, or choose another role",
            )
        return None
    if not name:
        raise InvalidRequest(
            "nobody holds the credential", where="--name", next_step="say who will: --name ana"
        )
    return Claims(
        role.value, name, None if expires is None else int(time.time() + _seconds(expires, "--expires"))
    )


def _seconds(text: str, option: str, *, least: int = 1) -> float:
    """Read a length of time."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None or int(match[1]) < least:
        raise InvalidRequest(
            f"{text!r} is no length of time",
            where=option,
            next_step="give minutes, hours or days: 90m, 12h, 30d",
        )
    return float(int(match[1]) * _UNITS[match[2]])
