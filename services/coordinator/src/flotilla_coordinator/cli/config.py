"""`flotilla config`: check configuration files and publish their schema."""

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
    """What a file describes."""

    stack = "stack"
    run = "run"


KindOption = Annotated[Kind | None, typer.Option(help="What the file is; found out when left out.")]


@app.command()
def validate(
    arguments: Annotated[list[str], typer.Argument(metavar="FILE... [key.path=value]...")],
    kind: KindOption = None,
    as_json: Json = False,
) -> None:
    """Merge files left to right, apply overrides, check, and print the resolved configuration."""
    from flotilla_coordinator.cli.arguments import split_arguments
    from flotilla_coordinator.cli.output import print_json, print_line, say
    from flotilla_core.config import dump_yaml, load

    files, overrides = split_arguments(arguments)
    chosen = kind or _kind_of(files)
    config = load(_model(chosen), files, overrides, resolve_paths=True)
    if as_json:
        print_json({"kind": chosen.value, "valid": True, "config": config.model_dump(mode="json")})
    else:
        print_line(dump_yaml(config).rstrip())
        say(f"valid {chosen.value} configuration")


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
    """By the top-level keys that only one of the two has."""
    from flotilla_core.config import RunConfig, StackConfig
    from flotilla_core.config.yaml_text import read_text_file

    keys: set[str] = set()
    for file in files:
        if file.exists():
            text = read_text_file(file).splitlines()
            keys |= {line.partition(":")[0] for line in text if line[:1].isalpha()}
    run_keys, stack_keys = (set(model.model_fields) for model in (RunConfig, StackConfig))
    return (
        Kind.run if len(keys & (run_keys - stack_keys)) > len(keys & (stack_keys - run_keys)) else Kind.stack
    )
