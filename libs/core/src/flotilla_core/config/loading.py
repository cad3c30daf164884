"""Read, check and write configurations, and explain what is wrong with one.

Invariants: later files win over earlier ones, and overrides over files; every problem is reported, all at once; each
line of a report names the place (file:line or override), the key path and what is expected, and an unknown key the one
that was probably meant. What `dump_yaml` writes, `load` reads back to an equal configuration.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flotilla_core.config.document import Document, KeyPath, describe, join, read_text_file, shortened
from flotilla_core.config.model import ConfigModel
from flotilla_core.config.other_programs import not_offered, same_keys_here
from flotilla_core.errors import InvalidConfig

Model = TypeVar("Model", bound=ConfigModel)

MOST_OVERRIDES = 1000

MOST_EXPLAINED = 50
"""Limit on reported problems of one configuration; a mistake in a long list is a problem for each item."""


def load(
    model: type[Model],
    files: Iterable[Path | str],
    overrides: Sequence[str] = (),
    *,
    resolve_paths: bool = False,
) -> Model:
    """Merge `files` left to right, apply `overrides` (`key.path=value`) and validate.

    `resolve_paths` makes every path absolute, so that the result means the same to a process elsewhere.
    """
    document = Document()
    for file in files:
        document.add_text(read_text_file(Path(file)), str(file))
    return _validated(model, document, overrides, resolve_paths)


def load_text(
    model: type[Model],
    text: str,
    *,
    source: str = "text",
    overrides: Sequence[str] = (),
    resolve_paths: bool = False,
) -> Model:
    """Load a configuration from a text; `source` names it in messages."""
    document = Document()
    document.add_text(text, source)
    return _validated(model, document, overrides, resolve_paths)


def read_values(text: str, source: str) -> dict[str, Any]:
    """Return the plain values of a text, which need not fit any model of this release."""
    document = Document()
    document.add_text(text, source)
    return document.values


def _validated(
    model: type[Model], document: Document, overrides: Sequence[str], resolve_paths: bool
) -> Model:
    if len(overrides) > MOST_OVERRIDES:
        raise InvalidConfig(
            "there are too many overrides",
            why=f"{len(overrides)} were given, and {MOST_OVERRIDES} is the limit",
        )
    for assignment in overrides:
        document.override(assignment)
    try:
        config = model.model_validate(document.values)
    except ValidationError as error:
        raise explain(error, model, document) from None
    return config.with_paths_from(Path.cwd()) if resolve_paths else config


def explain(failure: ValidationError, model: type[ConfigModel], document: Document) -> InvalidConfig:
    """Return one error that reports everything that validation found."""
    lines: dict[str, None] = {}
    problems = found_problems(failure, model, document.values)
    for path, message in problems[:MOST_EXPLAINED]:
        place = document.origin(path) or _mentioned_origin(message, document)
        lines[f"{place}: {message}" if place else message] = None
    if len(lines) == 1:
        return InvalidConfig(*lines)
    unsaid = max(0, len(problems) - MOST_EXPLAINED)
    more = f"\n  and {unsaid} more" if unsaid else ""
    return InvalidConfig(
        f"{len(lines) + unsaid} problems in the configuration:\n"
        + "\n".join(f"  {line}" for line in lines)
        + more
    )


def found_problems(
    failure: ValidationError, model: type[ConfigModel], values: dict[str, Any]
) -> list[tuple[KeyPath, str]]:
    """Say what validation found in these values: the path of each key, as written, and the sentence about it."""
    found = []
    for problem in failure.errors(include_url=False):
        path = _written_path(problem["loc"], problem["type"], values)
        found.append((path, _message(problem, path, model)))
    return found


def _message(problem: Any, path: KeyPath, model: type[ConfigModel]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return _unknown_key(path, model, value)
    if kind == "missing":
        return f"{join(path)} is missing"
    if kind == "union_tag_not_found":
        return f"{join(path)}.type is missing"
    if kind in ("union_tag_invalid", "literal_error") and isinstance(name := _name_of(value), str):
        return _unknown_name(path, kind, name, problem["ctx"])
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    text = text.partition(", unable to parse")[0]
    text = re.sub(r"^(\w+) should ", lambda kind: f"a {kind[1].lower()} that should ", text)
    if kind == "value_error":
        return f"{join(path)}: {text}" if path else text
    if kind == "model_type":
        text = "a mapping of keys to values"
    return f"{join(path)}: expected {text[0].lower()}{text[1:]}, got {describe(value)}"


def _unknown_key(path: KeyPath, model: type[ConfigModel], value: Any) -> str:
    meant, shown = _probably_meant(path, model), shortened(join(path))
    if meant == join(path):
        if path[0] == "judges":
            return f"unknown key {meant}: a judge with a url and one without have different keys"
        return f"unknown key {meant}: another {join(path[:-1])}.type has it, this one does not"
    if lacking := not_offered(path, value):
        return f"unknown key {shown}: {lacking}"
    if same := same_keys_here(path, value):
        own = set(_all_paths(model))
        said = [
            ("it" if theirs == join(path) else shortened(theirs))
            + f" is {ours if ours in own else _in_the_other_file(ours, model)}"
            + (f" ({note})" if note else "")
            for theirs, ours, note in same
        ]
        return f"unknown key {shown}; here {', '.join(said)}"
    other = _other(model)
    of_other = str(path[0]) in other.model_fields and str(path[0]) not in model.model_fields
    if of_other or join(path) in _all_paths(other):
        return f"unknown key {shown}: {shown} is a key of {_file_of(other)}"
    return f"unknown key {shown}" + (f"; did you mean {meant}?" if meant else "")


def _in_the_other_file(key: str, model: type[ConfigModel]) -> str:
    return f"{key} of {_file_of(_other(model))}"


def _other(model: type[ConfigModel]) -> type[ConfigModel]:
    """Return the model of the other file of a fleet."""
    from flotilla_core.config import RunConfig, StackConfig  # they are loaded by this module

    return RunConfig if model is StackConfig else StackConfig


def _file_of(model: type[ConfigModel]) -> str:
    return "stack.yaml" if "state_dir" in model.model_fields else "run.yaml"


def _name_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else value


def _unknown_name(path: KeyPath, kind: str, name: str, context: dict[str, Any]) -> str:
    """Return the names that pydantic expected, and the nearest of them."""
    of_a_section = kind == "union_tag_invalid"
    expected = context["expected_tags" if of_a_section else "expected"]
    known = re.findall(r"'([^']*)'", expected.replace("'user'", "'path.py:function'"))
    place = join((*path, "type")) if of_a_section else join(path)
    near = difflib.get_close_matches(_as_we_write(name), known, n=1)
    choice = " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}"
    return f"{place}: expected {choice}, got the text {shortened(name)!r}" + (
        f"; did you mean {near[0]}?" if near else ""
    )


def _as_we_write(name: str) -> str:
    """Return a name of another program in our letters: `REINFORCE++` is reinforce_plus_plus, `Dr. GRPO` is dr_grpo."""
    words = name.lower().replace("++", " plus plus")
    return "_".join(re.findall(r"[a-z0-9]+", words))


def _written_path(location: tuple[str | int, ...], kind: str, values: Any) -> KeyPath:
    """Return the key path as written: without the names of union members that validation inserts."""
    path: KeyPath = ()
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(values, dict):
            if part in values:
                values = values[part]
            elif not (last and kind == "missing"):
                continue
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        elif not (isinstance(values, list) and last and kind == "missing"):
            continue
        path = (*path, part)
    return path


def _probably_meant(path: KeyPath, model: type[ConfigModel]) -> str:
    *around, key = path
    models = {model}
    for part in around:
        if isinstance(part, str):
            below = {each for one in models if part in one.model_fields for each in _models_of(one, part)}
            models = below or models  # the user chooses the names in a mapping
    siblings = [name for one in models for name in one.model_fields]
    near = difflib.get_close_matches(str(key), siblings, n=1)
    if near:
        return join((*around, near[0]))
    elsewhere = [place for place in _all_paths(model) if place.rpartition(".")[2] == key]
    return min(elsewhere, key=lambda place: place.count("."), default="")


def completions(model: type[ConfigModel], begun: str) -> list[tuple[str, str]]:
    """Return what an override that begins so may become, and what each means.

    Keys are offered section by section, and a section that is the only one is entered. A single key comes with its
    values: those of an enumeration, otherwise its default.
    """
    key, equals, _ = begun.partition("=")
    *around, last = key.split(".")
    models, chosen_by_user = [model], False
    for part in around:
        if chosen_by_user:
            chosen_by_user = False
            continue
        fields = [one.model_fields[part] for one in models if part in one.model_fields]
        chosen_by_user = any(typing.get_origin(kind) in (dict, tuple) for kind in _kinds_of(fields))
        models = [below for one in models if part in one.model_fields for below in _models_of(one, part)]
    names = {} if chosen_by_user else _names_in(models)
    found = [name for name in names if (name == last if equals else name.startswith(last))]
    prefix = "".join(f"{part}." for part in around)
    if len(found) == 1:
        [name] = found
        if _is_section(names[name]) and not equals:
            return completions(model, f"{prefix}{name}.") or [(f"{prefix}{name}.", _meaning(models, name))]
        settings = [(f"{prefix}{name}={value}", text) for value, text in _values_of(names[name])]
        if equals:
            return [setting for setting in settings if setting[0].startswith(begun)]
        return [(f"{prefix}{name}=", _meaning(models, name)), *settings]
    return [
        (f"{prefix}{name}{'.' if _is_section(names[name]) else '='}", _meaning(models, name))
        for name in found
    ]


def _names_in(models: Sequence[type[ConfigModel]]) -> dict[str, list[FieldInfo]]:
    """Return the keys of sections of which one is taken, by its type."""
    found: dict[str, list[FieldInfo]] = {}
    for one in models:
        for name, field in one.model_fields.items():
            found.setdefault(name, []).append(field)
    return found


def _meaning(models: Sequence[type[ConfigModel]], name: str) -> str:
    """Return the first sentence about a key."""
    text = next(one for one in models if name in one.model_fields).descriptions().get(name, "")
    return re.split(r"(?<=[.;]) ", " ".join(text.split()))[0].rstrip(".;")


def _kinds_of(fields: Sequence[FieldInfo]) -> Iterator[Any]:
    """Yield the kinds of values that fields take, without what is inside of lists and mappings."""
    pending = [field.annotation for field in reversed(fields)]
    while pending:
        kind: Any = pending.pop()
        if typing.get_origin(kind) is typing.Annotated:
            pending.append(typing.get_args(kind)[0])
        elif typing.get_origin(kind) in (typing.Union, types.UnionType):
            pending.extend(reversed(typing.get_args(kind)))
        else:
            yield kind


def _is_section(fields: Sequence[FieldInfo]) -> bool:
    return any(
        typing.get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, ConfigModel))
        for kind in _kinds_of(fields)
    )


def _values_of(fields: Sequence[FieldInfo]) -> list[tuple[str, str]]:
    """Return the values of an enumeration, otherwise a default that is one word."""
    found: dict[str, str] = {}
    for kind in _kinds_of(fields):
        if kind is bool:
            found |= {"true": "", "false": ""}
        elif kind is types.NoneType:
            found["null"] = "empty"
        elif typing.get_origin(kind) is typing.Literal:
            found |= dict.fromkeys(map(str, typing.get_args(kind)), "")
    default = fields[0].default
    if isinstance(default, str | Path | int | float) and all(one.default == default for one in fields):
        text = yaml.safe_dump(default if isinstance(default, int | float) else str(default)).splitlines()[0]
        if text in found or (len(text.split()) == 1 and text[0] not in "'\""):
            found[text] = "the default"
    return list(found.items())


@cache
def _all_paths(model: type[ConfigModel]) -> list[str]:
    found = []
    for name in model.model_fields:
        found.append(name)
        for below in _models_of(model, name):
            found.extend(f"{name}.{path}" for path in _all_paths(below))
    return found


@cache
def _models_of(model: type[ConfigModel], name: str) -> list[type[ConfigModel]]:
    """Return the models that the field `name` may hold, directly, in a union or in a list."""
    found: list[type[ConfigModel]] = []
    pending = [model.model_fields[name].annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
            found.append(annotation)
        pending.extend(reversed(typing.get_args(annotation)))
    return found


def _mentioned_origin(message: str, document: Document) -> str:
    """Return the origin of the key that a message starts with: the key to change, in checks over several keys."""
    return document.origin(tuple(message.split(" ", 1)[0].split(".")))


def dump_yaml(config: ConfigModel) -> str:
    """Return every value, defaults included, in the order of the model."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def json_schema(model: type[ConfigModel]) -> dict[str, Any]:
    """Return the JSON schema, for editors and for the reference page."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    for section in _sections_of(model):
        of_section = schema if section is model else schema["$defs"][section.__name__]
        for name, text in section.descriptions().items():
            of_section["properties"][name]["description"] = text
    return schema


def _sections_of(model: type[ConfigModel]) -> set[type[ConfigModel]]:
    """Return a model and all models below it."""
    found, pending = {model}, [model]
    while pending:
        above = pending.pop()
        below = {one for name in above.model_fields for one in _models_of(above, name)} - found
        found |= below
        pending.extend(below)
    return found
