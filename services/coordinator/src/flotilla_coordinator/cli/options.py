"""Holds the options and arguments that commands share, runs their asyncio part, and defines their exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from flotilla_core.config import ConfigModel
    from flotilla_core.errors import FlotillaError

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


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return `latest` and the ids of the runs on disk that begin with `incomplete`, each with the state of its run.

    A shell shows what is printed here in the middle of a line, so there is no error: what cannot be read has no runs.
    """
    import sqlite3

    from flotilla_coordinator.cli.stack import stack_paths
    from flotilla_coordinator.ledger import queries, schema
    from flotilla_core.errors import FlotillaError

    try:
        ledger = stack_paths(context.params.get("stack")).directory / "ledger.sqlite"
        with contextlib.closing(schema.connect_read_only(ledger)) as db:
            records = queries.runs(db, RUNS_TO_OFFER)
    except (FlotillaError, OSError, sqlite3.Error):
        return []
    found = [
        ("latest", "the newest run"),
        *((record.run_id, record.state.name.lower()) for record in records),
    ]
    return [(name, state) for name, state in found if name.startswith(incomplete)]


RUNS_TO_OFFER = 50


def complete_setting(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the settings of a run, and the files, that begin with `incomplete`."""
    from flotilla_core.config import RunConfig

    return settings_that_begin(RunConfig, context, incomplete)


def settings_that_begin(
    model: type[ConfigModel], context: typer.Context, incomplete: str
) -> list[tuple[str, str]]:
    """Return keys with `=`, values of a key, and paths; where none of the keys fits, the shell offers paths."""
    from flotilla_core.config import completions

    given = context.params.get("arguments") or []
    if (values := _values_after_key(model, given, incomplete)) is not None:
        return values
    found = completions(model, incomplete) if given or incomplete else []
    if not found or "=" in incomplete:
        return found
    paths = sorted(Path().glob(f"{glob.escape(incomplete)}*"))
    shown = (f"{path}/" if path.is_dir() else str(path) for path in paths if not path.name.startswith("."))
    return found + [(path, "") for path in shown]


def _values_after_key(
    model: type[ConfigModel], given: list[str], incomplete: str
) -> list[tuple[str, str]] | None:
    """Return the values of a key that is a word of its own; None where no such key stands before the word.

    bash takes `key=value` for three words and replaces the last one; typer leaves out an `=` that is the last one.
    """
    from flotilla_core.config import completions

    after_equals = given[-1:] == ["="]
    key = "".join(given[-2:-1] if after_equals else given[-1:] if not incomplete else [])
    if not after_equals and (not key or f"{key}=" not in dict(completions(model, key))):
        return None
    return [(setting.partition("=")[2], meaning) for setting, meaning in completions(model, f"{key}=")]


def complete_live_setting(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the settings of an active run that begin with `incomplete`."""
    from flotilla_coordinator.runs.control import LIVE_KEYS
    from flotilla_core.config import RunConfig, completions

    values = _values_after_key(RunConfig, context.params.get("changes") or [], incomplete)
    if values is not None:
        return values
    return [one for key in LIVE_KEYS for one in completions(RunConfig, key) if key.startswith(incomplete)]


RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help='Id, unique prefix of an id, or "latest".', autocompletion=complete_run
    ),
]

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
"""The token is missing, wrong or expired, its role is too low, or a certificate is not good."""
PREFLIGHT = 5
"""The present state does not allow the command: a failed check, a service that died at its start, no free trainer or
generator, a run that has ended, a full disk."""
INTERRUPTED = 130
"""The user interrupted the command."""


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Return the files, then the overrides; an existing file is a file whatever its name."""
    from flotilla_core.errors import InvalidRequest

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
    from flotilla_core.errors import InvalidRequest

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
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        from flotilla_coordinator.cli.output import say

        say(f"\n{interrupted}")
        sys.exit(INTERRUPTED)


def code_of(error: FlotillaError) -> int:
    """Return the exit code of a command that ends with this error."""
    from flotilla_core import errors

    codes: dict[tuple[type[FlotillaError], ...], int] = {
        (errors.InvalidConfig, errors.InvalidRequest, errors.NotFound, errors.AlreadyExists): USAGE,
        (errors.Unavailable, errors.DeadlineExceeded): UNREACHABLE,
        (errors.Unauthenticated, errors.PermissionDenied): UNAUTHENTICATED,
        (
            errors.FailedPrecondition,
            errors.PortInUse,
            errors.Mismatch,
            errors.Exhausted,
            errors.DiskFull,
        ): PREFLIGHT,
        (errors.Cancelled,): INTERRUPTED,
    }
    return next((code for kinds, code in codes.items() if isinstance(error, kinds)), RUN_FAILED)
