"""Holds the options and arguments that commands share, runs their asyncio part, and defines their exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from flotilla_cli.output import say
from flotilla_core.errors import InvalidRequest

Stack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        envvar="FLOTILLA_STACK",
        metavar="FILE",
        show_default="stack.yaml, or the arithmetic example's",
        help="Stack file, or the name of a stack that runs here.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="FLOTILLA_COORDINATOR",
        metavar="HOST:PORT",
        show_default="that of the stack",
        help="Coordinator to ask.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


Result = TypeVar("Result")

OK = 0
"""The command is done."""
RUN_FAILED = 1
"""The run failed, a checkpoint is damaged, or an internal error occurred."""
USAGE = 2
"""The command or the configuration is wrong, or a name does not exist."""
UNREACHABLE = 3
"""A service cannot be reached, is not running, or did not get ready in time."""
UNAUTHENTICATED = 4
"""A credential is missing, expired or foreign, or its role is too low."""
PREFLIGHT = 5
"""The present state does not allow the command: a failed check, a service that died at its start, no free trainer or
generator, a run that has ended, a full disk."""
INTERRUPTED = 130
"""The user interrupted the command."""


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Return the files, then the overrides; an existing file is a file whatever its name."""
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    files = [Path(text) for text in arguments if text not in overrides]
    if not files:
        raise InvalidRequest(
            "no configuration file is given",
            where=" ".join(arguments),
            next_step="name one or more YAML files before the key=value overrides",
        )
    return files, overrides


def make_folder_of(output: Path) -> None:
    """Make the folder of the file that -o names; raise InvalidRequest where that cannot be."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"the folder {output.parent} cannot be made",
            where=f"-o {output}",
            why=error.strerror or str(error),
            next_step="name a file in a folder that you may write",
        ) from None


def wait(work: Coroutine[Any, Any, Result], *, interrupted: str = "interrupted") -> Result:
    """Return the result; on Ctrl-C cancel the work in order, print `interrupted`, and exit with code 130."""
    # A command that waits for nobody does not import it.
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        say(f"\n{interrupted}")
        sys.exit(INTERRUPTED)
