"""Completes the words of a command in a shell: runs by what is on disk, and settings by the configuration."""

from __future__ import annotations

import contextlib
import glob
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from flotilla_cli.stack import stack_paths
from flotilla_core import config
from flotilla_core.config import ConfigModel, completions
from flotilla_core.errors import FlotillaError

RUNS_TO_OFFER = 50


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return `latest` and the ids of the runs on disk that begin with `incomplete`, each with the state of its run.

    A shell shows what is printed here in the middle of a line, so there is no error: what cannot be read has no runs.
    """
    try:
        from flotilla_coordinator.ledger import queries, schema

        ledger = stack_paths(context.params.get("stack")).directory / "ledger.sqlite"
        with contextlib.closing(schema.connect_read_only(ledger)) as db:
            records = queries.runs(db, RUNS_TO_OFFER)
    except (FlotillaError, ImportError, OSError, sqlite3.Error):
        return []
    found = [
        ("latest", "the newest run"),
        *((record.run_id, record.state.name.lower()) for record in records),
    ]
    return [(name, state) for name, state in found if name.startswith(incomplete)]


def complete_setting(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the settings of a run, and the files, that begin with `incomplete`."""
    return settings_that_begin(config.RunConfig, context, incomplete)


def settings_that_begin(
    model: type[ConfigModel], context: typer.Context, incomplete: str
) -> list[tuple[str, str]]:
    """Return keys with `=`, values of a key, and paths; where none of the keys fits, the shell offers paths."""
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
    after_equals = given[-1:] == ["="]
    key = "".join(given[-2:-1] if after_equals else given[-1:] if not incomplete else [])
    if not after_equals and (not key or f"{key}=" not in dict(completions(model, key))):
        return None
    return [(setting.partition("=")[2], meaning) for setting, meaning in completions(model, f"{key}=")]


def complete_live_setting(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the settings of an active run that begin with `incomplete`."""
    values = _values_after_key(config.RunConfig, context.params.get("changes") or [], incomplete)
    if values is not None:
        return values
    keys = [key for key in config.LIVE_KEYS if key.startswith(incomplete)]
    return [one for key in keys for one in completions(config.RunConfig, key)]


RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help='Id, unique prefix of an id, or "latest".', autocompletion=complete_run
    ),
]
