"""Implements `flotilla config`: checks the files that a stack or a run needs before it starts.

Invariant: folders that Flotilla makes itself are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from glob import has_magic, iglob
from pathlib import Path
from typing import Annotated

import typer

from flotilla.common.v1.finding_pb2 import Severity
from flotilla_cli.completion import settings_that_begin
from flotilla_cli.credential_check import credential_finding
from flotilla_cli.options import Json, split_arguments
from flotilla_cli.output import print_json, print_line, say
from flotilla_core.config import (
    IsolationConfig,
    PolicyConfig,
    RunConfig,
    StackConfig,
    dump_yaml,
    json_schema,
    load,
)
from flotilla_core.config.document import read_text_file
from flotilla_core.config.model import HUB, is_url
from flotilla_core.config.other_programs import OURS
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.findings import found_of
from flotilla_core.gangs import model_of, named_gangs
from flotilla_core.generated_tasks import TASKS
from flotilla_core.judge_generators import judge_roles
from flotilla_core.roles import NAMED, section_of
from flotilla_launch.environment import presentable

app = typer.Typer(help="Check configuration files; print their JSON Schema.", no_args_is_help=True)

Found = tuple[str, Path | str, str]
"""Key, path and problem; the problem is empty where there is none."""


class Kind(StrEnum):
    """The kinds of configuration files."""

    stack = "stack"
    run = "run"


KindOption = Annotated[Kind | None, typer.Option(help="What the file describes; detected if not given.")]


def complete_any_setting(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the settings of the kind of the files that begin with `incomplete`."""
    files = [Path(text) for text in context.params.get("arguments") or []]
    try:
        kind = context.params.get("kind") or _kind_of(files)
    except FlotillaError:
        return []
    return settings_that_begin(_model(Kind(kind)), context, incomplete)


@app.command()
def validate(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [key.path=value]...", autocompletion=complete_any_setting),
    ],
    kind: KindOption = None,
    as_json: Json = False,
) -> None:
    """Merge files left to right, apply overrides, check what needs no fleet, print the resolved configuration."""
    files, overrides = split_arguments(arguments)
    chosen = kind or _kind_of(files)
    config = load(_model(chosen), files, overrides, resolve_paths=True)
    checked, warnings = check(config)
    config = presentable(config)
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


def check(config: StackConfig | RunConfig) -> tuple[list[str], list[str]]:
    """List what was checked beyond keys and values, and the warnings; raises where something is wrong."""
    checked = ["keys, types and bounds"]
    warnings: list[str] = []
    if isinstance(config, RunConfig):
        from flotilla_coordinator.plan.chapter import Chapter
        from flotilla_coordinator.plan.checks import config_errors
        from flotilla_coordinator.plan.functions import functions_of, loading_problems

        errors = Chapter.of(config_errors(config)).errors
        paths = paths_of_run(config)
        checked.append("settings that contradict each other, groups and samples under way")
        if functions := functions_of(config):
            loading = Chapter.of(loading_problems(config, IsolationConfig()))
            warnings, errors = loading.warnings, errors + loading.errors
            names = ", ".join(f"{function.key} {function.name}" for function in functions)
            checked.append(f"functions and their parameters ({names})")
    else:
        credential = credential_finding(config)
        warnings += [found_of(credential)] if credential.severity == Severity.SEVERITY_WARNING else []
        errors = [found_of(credential)] if credential.severity == Severity.SEVERITY_ERROR else []
        checked.append("the credential")
        paths = paths_of_stack(config)
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
    print_json(json_schema(_model(kind)))


def _model(kind: Kind) -> type[StackConfig] | type[RunConfig]:
    return StackConfig if kind is Kind.stack else RunConfig


def _kind_of(files: list[Path]) -> Kind:
    """Detect the kind by the top-level keys that only one of the two has; of other programs' keys, by ours for them."""
    keys: set[str] = set()
    for file in files:
        if os.path.exists(file):
            text = read_text_file(file).splitlines()
            keys |= {line.partition(":")[0] for line in text if line[:1].isalpha()}
    run_keys, stack_keys = (set(_model(kind).model_fields) for kind in (Kind.run, Kind.stack))
    ours = [key if key in run_keys | stack_keys else OURS.get(key, key).partition(".")[0] for key in keys]
    of_run = sum(key in run_keys and key not in stack_keys for key in ours)
    of_stack = sum(key in stack_keys and key not in run_keys for key in ours)
    return Kind.run if of_run > of_stack else Kind.stack


def paths_of_run(config: RunConfig) -> list[Found]:
    """Check data files, and folders with weights."""
    return list(_of_run(config))


def paths_of_stack(config: StackConfig) -> list[Found]:
    """Check models that are not names of a hub."""
    return list(_of_stack(config))


def _of_run(config: RunConfig) -> Iterator[Found]:
    train = config.data.train
    if isinstance(train, Path):
        yield _data("data.train", train)
    else:
        yield from (_data(f"data.train[{index}].path", one.path) for index, one in enumerate(train))
    held_out = () if config.evaluation is None else config.evaluation.data
    if isinstance(held_out, Path):
        yield _data("evaluation.data", held_out)
    else:
        yield from (_data(f"evaluation.data[{index}].path", one.path) for index, one in enumerate(held_out))
    for term in config.judged_terms:
        if term.agreement is not None:
            yield _data(f"agreement.examples of {term.shown}", term.agreement.examples)
    if isinstance(config.initial_weights, Path):
        yield _folder("initial_weights", config.initial_weights, "config.json")
    if config.lora is not None and config.lora.adapter is not None:
        yield _folder("lora.adapter", config.lora.adapter, "adapter_config.json")
    if isinstance(config.algorithm, PolicyConfig) and config.algorithm.critic is not None:
        weights = config.algorithm.critic.initial_weights
        if isinstance(weights, Path):
            yield _folder("algorithm.critic.initial_weights", weights, "config.json")


def _of_stack(config: StackConfig) -> Iterator[Found]:
    models = {"model": config.model, "critic.model": config.critic.model}
    models |= {"reference.model": config.reference.model, "teacher.model": config.teacher.model}
    for kind, named in named_gangs(config).items():
        models |= {f"{NAMED[kind]}.{name}.model": gang.model for name, gang in named.items()}
    models |= {f"{section_of(role)}.model": model_of(config, role) for role in judge_roles(config)}
    for key, model in models.items():
        if isinstance(model, Path):
            yield _folder(key, model, "config.json")
        elif (
            model is not None
            and not is_url(model)
            and (model.count("/") != 1 or model.startswith((".", "/", "~")))
        ):
            yield (
                key,
                model,
                f"there is no such folder as {model}, and a name of the hub is organisation/model",
            )


def _data(key: str, path: Path) -> Found:
    """Check that a data set is there, without its rows and without asking the hub."""
    if str(path).startswith((HUB, TASKS)) or os.path.isdir(path):
        return key, path, ""
    if has_magic(str(path)) and not os.path.isfile(path):
        fits = next(iglob(str(path), recursive=True), None)
        return key, path, "" if fits else f"no file fits the pattern {path}"
    return _file(key, path)


def _file(key: str, path: Path) -> Found:
    if not os.path.isfile(path):
        return key, path, f"{path} is a folder" if os.path.isdir(path) else f"the file {path} does not exist"
    return key, path, "" if os.access(path, os.R_OK) else f"{path} may not be read"


def _folder(key: str, path: Path, content: str) -> Found:
    if not os.path.isdir(path):
        return key, path, f"the folder {path} does not exist"
    return key, path, "" if os.path.isfile(path / content) else f"{path} has no {content}"
