"""The entry point of `flotilla`: joins the commands, and turns every failure into a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from flotilla_coordinator.cli import (
    checkpoint,
    config,
    doctor,
    evaluate,
    fleet,
    init,
    logs,
    replicas,
    reward,
    run,
    samples,
    stacks,
    timeline,
)
from flotilla_coordinator.cli.options import INTERRUPTED, RUN_FAILED, code_of
from flotilla_core.files import keep_private, speak_utf8
from flotilla_core.terminal import visible

if TYPE_CHECKING:
    from flotilla_core.errors import FlotillaError


_UsageError: Any = typer.BadParameter.__base__
"""The parser's error; typer has no name for its class."""


class _Commands(TyperGroup):
    """All commands; an error about an argument quotes it without what a terminal would obey."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _visible_message():
            return super().make_context(*arguments, **options)

    def invoke(self, context: Any) -> Any:
        with _visible_message():
            return super().invoke(context)


@contextmanager
def _visible_message() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = visible(error.message)
        raise


app = typer.Typer(
    name="flotilla",
    cls=_Commands,
    help="Reinforcement-learning post-training on a fleet of services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Print the version of Flotilla and end, where it is asked for."""
    if wanted:
        from importlib.metadata import version

        from flotilla_coordinator.cli.output import print_line

        print_line(f"flotilla {version('flotilla-core')}")
        raise typer.Exit


@app.callback()
def flotilla(
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="FLOTILLA_TOKEN_FILE",
            metavar="FILE",
            show_default="the stack's own",
            help="File (mode 0600) with the token that signs calls.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    if token_file is not None:
        os.environ["FLOTILLA_TOKEN_FILE"] = str(token_file.absolute())


app.command()(init.init)
app.command()(fleet.up)
app.command()(fleet.down)
app.command()(fleet.ps)
app.command()(logs.logs)
app.command()(stacks.stacks)
app.command()(stacks.profile)
app.command()(stacks.drain)
app.command()(fleet.scale)
app.command()(fleet.upgrade)
app.add_typer(replicas.app, name="replicas")
app.add_typer(replicas.weights_app, name="weights")
app.add_typer(reward.app, name="reward")
app.add_typer(run.app, name="run")
run.app.command()(run.pause)
run.app.command("set")(run.set_)
app.command()(samples.samples)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("eval")(evaluate.evaluate)
app.command()(timeline.timeline)
app.command()(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(config.token_app, name="token")
app.add_typer(config.certs_app, name="certs")


@cache
def all_commands() -> Any:
    """Return all commands as the parser wants them; a process that runs several commands builds them once."""
    return get_command(app)


def main() -> None:
    """Run one command."""
    speak_utf8()
    keep_private()
    try:
        all_commands()()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    # This is the boundary of the command; an error that is not Flotilla's is raised again.
    except Exception as error:  # noqa: BLE001
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    from flotilla_coordinator.cli.output import print_error, say

    failure = _named(error)
    if failure is None:
        import traceback

        say("".join(traceback.format_exception(error)).rstrip())
        sys.exit(RUN_FAILED)
    print_error(failure, as_json="--json" in sys.argv)
    sys.exit(code_of(failure))


def _named(error: Exception) -> FlotillaError | None:
    """Return a Flotilla error as is, an error of the file system or SQLite as one of ours, and None for a defect."""
    import sqlite3

    from flotilla_core.disk import disk_full
    from flotilla_core.errors import FailedPrecondition, FlotillaError

    if isinstance(error, FlotillaError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        where = Path(str(error.filename))
        return disk_full(error, "a file cannot be written", where) or FailedPrecondition(
            "a file cannot be used",
            where=str(where),
            why=error.strerror or str(error),
            next_step="see whether state_dir in the stack file is a directory that you may read and write",
        )
    if isinstance(error, sqlite3.Error):
        return FailedPrecondition(
            "the records of the stack cannot be read",
            why=str(error),
            next_step="see whether state_dir in the stack file is on a disk that works: flotilla doctor",
        )
    return None


if __name__ == "__main__":
    main()
