"""Implements `flotilla config`: checks configuration files and prints their schema."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flotilla_coordinator.cli.options import Json

if TYPE_CHECKING:
    from flotilla_core.config import RunConfig, StackConfig

app = typer.Typer(help="Check configuration files; print their JSON Schema.", no_args_is_help=True)


class Kind(StrEnum):
    """The kinds of configuration files."""

    stack = "stack"
    run = "run"


KindOption = Annotated[Kind | None, typer.Option(help="What the file describes; detected if not given.")]


@app.command()
def validate(
    arguments: Annotated[list[str], typer.Argument(metavar="FILE... [key.path=value]...")],
    kind: KindOption = None,
    as_json: Json = False,
) -> None:
    """Merge files left to right, apply overrides, check what needs no fleet, print the resolved configuration."""
    from flotilla_coordinator.cli.options import split_arguments
    from flotilla_coordinator.cli.output import print_json, print_line, say
    from flotilla_core.config import dump_yaml, load

    files, overrides = split_arguments(arguments)
    chosen = kind or _kind_of(files)
    config = load(_model(chosen), files, overrides, resolve_paths=True)
    checked, warnings = _checked(config)
    if as_json:
        values = config.model_dump(mode="json")
        print_json(
            {"kind": chosen.value, "valid": True, "checked": checked, "warnings": warnings, "config": values}
        )
        return
    print_line(dump_yaml(config).rstrip())
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"valid {chosen.value} configuration; checked: {'; '.join(checked)}")
    if chosen is Kind.run:
        say("not checked: model, tokens, memory and disk, which `flotilla run plan` checks against a stack")


def _checked(config: StackConfig | RunConfig) -> tuple[list[str], list[str]]:
    """List what was checked beyond keys and values, and the warnings; raises where something is wrong."""
    from flotilla_core.config import RunConfig
    from flotilla_core.errors import InvalidConfig

    checked = ["keys, types and bounds"]
    warnings: list[str] = []
    if isinstance(config, RunConfig):
        from flotilla_coordinator.plan.checks import config_errors
        from flotilla_coordinator.plan.functions import functions_of, loading_problems
        from flotilla_coordinator.plan.paths import paths_of_run

        errors = config_errors(config)
        paths = paths_of_run(config)
        checked.append("settings that contradict each other, groups and samples under way")
        if functions := functions_of(config):
            problems, warnings = loading_problems(config)
            errors += problems
            names = ", ".join(f"{function.key} {function.name}" for function in functions)
            checked.append(f"functions and their parameters ({names})")
    else:
        from flotilla_coordinator.plan.paths import paths_of_stack

        errors, paths = [], paths_of_stack(config)
    errors += [f"{key}: {problem}" for key, path, problem in paths if problem]
    if paths:
        checked.append(f"paths ({', '.join(f'{key} {path}' for key, path, _ in paths)})")
    if errors:
        raise InvalidConfig(
            f"{len(errors)} problem{'s' if len(errors) > 1 else ''} in the configuration:\n"
            + "\n".join(f"  {error}" for error in errors)
        )
    return checked, warnings


@app.command()
def schema(kind: Annotated[Kind, typer.Argument(help="stack or run")], as_json: Json = True) -> None:
    """Print the JSON Schema, for editors (it is JSON with or without --json)."""
    from flotilla_coordinator.cli.output import print_json
    from flotilla_core.config import json_schema

    print_json(json_schema(_model(kind)))


def _model(kind: Kind) -> type[StackConfig] | type[RunConfig]:
    from flotilla_core.config import RunConfig, StackConfig

    return StackConfig if kind is Kind.stack else RunConfig


def _kind_of(files: list[Path]) -> Kind:
    """Detect the kind by the top-level keys that only one of the two has."""
    from flotilla_core.config import RunConfig, StackConfig
    from flotilla_core.config.document import read_text_file

    keys: set[str] = set()
    for file in files:
        if file.exists():
            text = read_text_file(file).splitlines()
            keys |= {line.partition(":")[0] for line in text if line[:1].isalpha()}
    run_keys, stack_keys = (set(model.model_fields) for model in (RunConfig, StackConfig))
    return (
        Kind.run if len(keys & (run_keys - stack_keys)) > len(keys & (stack_keys - run_keys)) else Kind.stack
    )
