"""Implements `flotilla config`, `flotilla token` and `flotilla certs`: the files that a stack needs before it starts.

Invariants: folders that Flotilla makes itself are not checked; a token is written to a file that only its owner can
read, or printed on stdout alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from enum import StrEnum
from glob import has_magic, iglob
from pathlib import Path
from typing import Annotated

import typer

from flotilla_cli.completion import settings_that_begin
from flotilla_cli.options import Json, Stack, make_folder_of, split_arguments
from flotilla_cli.output import print_json, print_line, say
from flotilla_cli.stack import load_stack
from flotilla_core.config import PolicyConfig, RunConfig, StackConfig, dump_yaml, json_schema, load
from flotilla_core.config.document import read_text_file
from flotilla_core.config.model import HUB, is_url
from flotilla_core.config.other_programs import OURS
from flotilla_core.errors import FlotillaError, InvalidConfig, InvalidRequest
from flotilla_core.trust import Claims, certificates, make_role_token, read_token, rotate_token, write_secret
from flotilla_launch.environment import presentable
from flotilla_launch.paths import StackPaths

app = typer.Typer(help="Check configuration files; print their JSON Schema.", no_args_is_help=True)

token_app = typer.Typer(
    help="Make tokens for people and programs; replace the stack's own.", no_args_is_help=True
)

certs_app = typer.Typer(help="Make certificates for encryption between hosts.", no_args_is_help=True)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}

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
            loading = Chapter.of(loading_problems(config))
            warnings, errors = loading.warnings, errors + loading.errors
            names = ", ".join(f"{function.key} {function.name}" for function in functions)
            checked.append(f"functions and their parameters ({names})")
    else:
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
    """Check models that are not names of a hub, and the file of the token."""
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
    models |= {f"teachers.{name}.model": gang.model for name, gang in config.teachers.items()}
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
    if config.bind.token_file is not None:
        yield _file("bind.token_file", config.bind.token_file)
    if config.bind.tls is not None:
        for key, path in config.bind.tls:
            yield _file(f"bind.tls.{key}", path)


def _data(key: str, path: Path) -> Found:
    """Check that a data set is there, without its rows and without asking the hub."""
    if str(path).startswith(HUB) or os.path.isdir(path):
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


class Role(StrEnum):
    """The roles that a token can have."""

    read = "read"
    run = "run"
    admin = "admin"


@token_app.command()
def create(
    role: Annotated[
        Role,
        typer.Option(help="read looks; run also starts and steers runs; admin also changes the fleet."),
    ],
    name: Annotated[str, typer.Option(help="Who holds it, as errors and logs say: ana, ci@example.")],
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default="never", help="For how long it is good: 90m, 12h, 30d."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there, with mode 0600.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Make a token with a role from the stack's own; no service has to be told of it."""
    config = load_stack(stack)
    ends_s = None if expires is None else int(time.time() + _seconds(expires))
    secret = read_token(config.bind, StackPaths.of(config.state_dir, config.name).directory)
    token = make_role_token(secret, Claims(role.value, name, ends_s))
    if output is not None:
        make_folder_of(output)
        write_secret(output, token)
        say(f"{output}: use it by --token-file {output}, FLOTILLA_TOKEN_FILE or bind.token_file")
    if as_json:
        shown = {"file": str(output)} if output is not None else {"token": token}
        print_json({"role": role.value, "name": name, "expires_at": ends_s, **shown})
    elif output is None:
        print_line(token)


@token_app.command()
def rotate(stack: Stack = None, as_json: Json = False) -> None:
    """Replace the stack's own token while everything runs; the previous one is accepted for a while."""
    config = load_stack(stack)
    file = rotate_token(config.bind, StackPaths.of(config.state_dir, config.name).directory)
    overlap_s = config.bind.token_overlap_s
    if as_json:
        print_json({"file": str(file), "overlap_s": overlap_s})
        return
    print_line(f"{file}: a new token; the previous one, and all tokens with a role, end in {overlap_s:g} s")


@certs_app.command("init")
def init_certificates(
    hosts: Annotated[
        str,
        typer.Option(metavar="HOST,...", help="Names and addresses by which hosts are dialled: a,10.0.0.2."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the authority and the hosts' folders are.")
    ] = Path("certs"),
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="For how many days a certificate is good.")
    ] = 365,
    as_json: Json = False,
) -> None:
    """Make an authority, and a certificate for each host; again: renew them by the same authority."""
    names = [name for name in hosts.split(",") if name]
    wrong = [name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}", name) is None]
    if wrong or not names:
        raise InvalidRequest(
            f"{', '.join(wrong) or hosts!r} is no host", where="--hosts", next_step="name hosts: a,10.0.0.2"
        )
    folders = certificates.make_certificates(out, names, days)
    if as_json:
        print_json({"authority": str(out / certificates.CA_FILE), "folders": [str(one) for one in folders]})
        return
    for folder in folders:
        print_line(f"{folder}: certificate, key and authority, good for {days} days")
    print_line(
        f"keep {out}/ca.key to yourself; copy each folder to its host, and write to the stack file there:"
    )
    print_line("bind:\n  tls:")
    for key, file in (
        ("certificate_file", certificates.CERTIFICATE_FILE),
        ("key_file", certificates.KEY_FILE),
        ("ca_file", certificates.CA_FILE),
    ):
        print_line(f"    {key}: {(folders[0] / file).absolute()}")


def _seconds(text: str) -> float:
    """Read a length of time."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise InvalidRequest(
            f"{text!r} is no length of time",
            where="--expires",
            next_step="give minutes, hours or days: 90m, 12h, 30d",
        )
    return float(int(match[1]) * _UNITS[match[2]])
