"""The entry point of `flotilla`: lists the commands and loads the one that is called.

Invariant: nothing that a command needs is imported before it is called, so that `flotilla --help` and a shell's
completion of its words are quick.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from flotilla_core.files import keep_private, speak_utf8
from flotilla_core.terminal import visible


class Entry(NamedTuple):
    """A command or a group, by what the list of all commands says of it."""

    name: str
    place: str
    """The module, and the name in it of the command's function or of the group."""
    help: str
    """The first line of its own help."""


ENTRIES = (
    Entry(
        "init",
        "init:init",
        "Write stack.yaml and run.yaml for a model and data, by the GPUs of this host, and plan the run.",
    ),
    Entry(
        "up",
        "fleet:up",
        "Start a stack and wait until every service is ready; a running stack is left unchanged.",
    ),
    Entry("down", "fleet:down", "Stop all processes of a stack; only its files in the state directory stay."),
    Entry("ps", "fleet:ps", "List the processes of a stack."),
    Entry(
        "logs",
        "logs:logs",
        "Show the logs of a stack, also of a stopped one and of services on other machines.",
    ),
    Entry(
        "stacks",
        "stacks:stacks",
        "Show what a service is doing, and the stack of every thread and task of it, of its ranks too.",
    ),
    Entry(
        "profile",
        "stacks:profile",
        "Sample the stacks of a service for a while, and write them for a flame graph (collapsed stacks).",
    ),
    Entry(
        "drain",
        "stacks:drain",
        "End a service that no launcher of this machine started, once it has finished what it has.",
    ),
    Entry(
        "scale",
        "fleet:scale",
        "Change the number of replicas of a running stack; waits until new ones are ready.",
    ),
    Entry(
        "upgrade",
        "fleet:upgrade",
        "Replace the replicas of a running stack one by one with processes of the release of this command.",
    ),
    Entry(
        "samples",
        "samples:samples",
        "Show samples of a run, the oldest first: prompt, response, reward, version and what became of each.",
    ),
    Entry(
        "eval",
        "evaluate:evaluate",
        "Evaluate a model, a checkpoint or a run on held-out data, by a fleet of its own without a trainer.",
    ),
    Entry(
        "record",
        "record:record",
        "Draw samples of a model, a checkpoint or a run and record them, by a fleet of its own without a trainer.",
    ),
    Entry(
        "timeline",
        "timeline:timeline",
        "Write the timeline of a run; also works when the coordinator is down or was killed.",
    ),
    Entry(
        "doctor",
        "doctor:doctor",
        "Check everything a stack needs; each line says what was found and what to do about it.",
    ),
    Entry("replicas", "replicas:app", "List replicas, and take one out of service."),
    Entry("weights", "replicas:weights_app", "Weights of active runs."),
    Entry("reward", "reward:app", "Rewards that a run may name."),
    Entry("env", "env:app", "Environments that a run may name."),
    Entry("run", "run:app", "Start, follow and stop runs."),
    Entry("checkpoint", "checkpoint:app", "List, check, export and remove checkpoints of a run."),
    Entry("config", "config:app", "Check configuration files; print their JSON Schema."),
    Entry("token", "token:app", "Make credentials for people, programs and hosts; replace the stack's own."),
)


_UsageError: Any = typer.BadParameter.__base__
"""The parser's error; typer has no name for its class."""


class _Commands(TyperGroup):
    """All commands; an error about an argument quotes it without what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {entry.name: TyperCommand(entry.name, help=entry.help) for entry in ENTRIES}

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Load the command that is called; help and completion list the others by what the table says."""
        name, listed, rest = super().resolve_command(context, arguments)
        try:
            return name, listed and load_command(listed.name), rest
        except ImportError:
            # A shell completes what is installed here, and shows an error in the middle of a line.
            if not context.resilient_parsing:
                raise
            return name, listed, rest

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

        from flotilla_cli.output import print_line

        print_line(f"flotilla {version('flotilla-core')}")
        raise typer.Exit


@app.callback()
def flotilla(
    credential_file: Annotated[
        Path | None,
        typer.Option(
            "--credential-file",
            envvar="FLOTILLA_CREDENTIAL_FILE",
            metavar="FILE",
            show_default="the stack's own",
            help="File (mode 0600) with the credential that calls show.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    if credential_file is not None:
        os.environ["FLOTILLA_CREDENTIAL_FILE"] = str(credential_file.absolute())


@cache
def load_command(name: str) -> Any:
    """Return a command with its arguments, or a group with its commands; imports what they need."""
    module, member = next(entry.place for entry in ENTRIES if entry.name == name).split(":")
    found = getattr(import_module(f"flotilla_cli.{module}"), member)
    alone = typer.Typer()
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    return get_group(alone).commands[name]


@cache
def all_commands() -> Any:
    """Return all commands as the parser wants them, each of them loaded when it is called."""
    return get_command(app)


def load_commands() -> Any:
    """Return all commands, loaded: for those who describe them, and for a process that runs several of them."""
    every = all_commands()
    every.commands = {name: load_command(name) for name in every.commands}
    return every


def main() -> None:
    """Run one command."""
    # What a command loads stays until its end: to look for garbage in it is lost time, a tenth of that of a plan.
    gc.set_threshold(1_000_000)
    speak_utf8()
    keep_private()
    # Pydantic would look through every installed package for plugins, here and in each process that a command starts.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        all_commands()()
    # This is the boundary of the command; an error that is not Flotilla's is shown with its traceback.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        # A command that fails has loaded most of it, and one that only helps needs none of it.
        from flotilla_cli.failures import fail

        fail(error)
    finally:
        gc.freeze()  # The end of the process looks through everything for garbage, more than once.


if __name__ == "__main__":
    main()
