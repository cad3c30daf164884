"""The base of every section of a configuration, and of the sections that name a function.

Invariants: an unknown key is an error, values never change after validation, every field has a description, with
its unit where it has one; a relative path is relative to the file that contains it. Functions of Flotilla are plain
names, the user's functions are written path.py:function and never look like ours.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
import types
import typing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flotilla_core.addresses import canonical
from flotilla_core.generated_tasks import TASKS, TaskSource, is_generated
from flotilla_core.roles import GANG_NAME
from flotilla_core.structs import unfit

LONGEST_TEXT = 4096
"""Limit in characters of a name, a path or an address."""
LONGEST_FILE_NAME = 255
"""Limit in bytes of one part of a path, set by file systems."""

PATTERN = r"^.+\.py:[A-Za-z_]\w*$"

_FUNCTION = re.compile(PATTERN)

HUB = "hub:"
"""Begins the name of a model or a data set on the hub; `owner/name` alone is one where no such path is there."""

_DATA_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

STORES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "file": ""}
"""Schemes of object storage, each with the package that the user installs for it."""


def is_url(place: object) -> bool:
    """Return whether a folder is given by its place in object storage, as s3://bucket/prefix."""
    return isinstance(place, str) and "://" in place


def checked_url(place: str) -> str:
    """Return a place in object storage; raise ValueError where it is none."""
    scheme, found, rest = place.partition("://")
    if not found or scheme not in STORES or not rest.strip("/") or ".." in rest.split("/"):
        known = ", ".join(f"{name}://" for name in STORES)
        raise ValueError(f"expected bucket/prefix behind one of {known}, got the text {place[:80]!r}")
    return place.rstrip("/")


def _folder_or_url(value: object) -> object:
    if isinstance(value, str):
        return checked_url(value) if is_url(value) else Path(value)
    return value


FolderOrUrl = Annotated[Path | str, BeforeValidator(_folder_or_url)]
"""A folder of this host, or one in object storage."""


def _folder_or_name(value: object) -> object:
    """Return a Path if the folder exists, else the name on the hub, without what begins it."""
    if not isinstance(value, str | Path):
        return value
    if str(value).startswith(HUB):
        return str(value).removeprefix(HUB)
    if is_url(value):
        return checked_url(str(value))
    folder = expanded(Path(value))
    # A folder that this user may not enter counts as existing: the process that reads it reports the problem.
    return folder if os.path.isdir(folder) else str(value)


ModelName = Annotated[Path | str, BeforeValidator(_folder_or_name)]
"""A folder of this host, one in object storage, or a name on a hub."""

HostName = Annotated[str, AfterValidator(canonical)]
"""An address, or a name of a host; brackets around one of IPv6 are taken off."""

GangName = Annotated[str, StringConstraints(pattern=GANG_NAME)]
"""Lower-case letters, digits and `_`, starting with a letter."""


def data_source(source: object) -> object:
    """Return the files of this host as they are named, and `owner/name` as the name on the hub that it then is.

    It is one where this host has neither such a path nor a folder `owner`, and the name does not end like a file's.
    """
    name = str(source)
    if is_generated(name):
        TaskSource.parse(name)
    if not isinstance(source, str | Path) or not _DATA_ON_HUB.fullmatch(name):
        return source
    here = os.path.lexists(name) or os.path.lexists(os.path.dirname(name))
    return source if here or Path(name).suffix[1:].isalpha() else f"{HUB}{name}"


DataSource = Annotated[Path, BeforeValidator(data_source)]
"""Files of this host, a data set on the hub, or tasks of reasoning_gym."""

AgreementLimit = Annotated[float, Field(gt=0, le=1, strict=True)] | Literal["auto"]
"""A mean difference of token probabilities between generator and trainer; `auto` is what rounding explains."""


class ConfigModel(BaseModel):
    """A section of a configuration file.

    A field that holds a section takes its default from a factory. A default object would build the model of that
    section at each import, also in a process that never reads it. Where the field takes one kind of section alone, an
    empty mapping stands for the default: an object would build that model once more, beside the one within its parent.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        defer_build=True,  # a process that reads no configuration does not wait for it
        allow_inf_nan=False,
        str_max_length=LONGEST_TEXT,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            if field.default_factory is field.annotation:
                field.default_factory = dict

    @field_validator("*", mode="before")
    @classmethod
    def _has_the_type_of_its_key(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that would be read as another type: `steps: true` is no step, `whiten: 1` no truth value."""
        kinds = _kinds(cls, info.field_name)
        number = "a valid number" if float in kinds else "a valid integer"
        items = value if isinstance(value, list | tuple) else (value,)
        if isinstance(value, dict) and dict in kinds:
            items = tuple(value.values())
        for item in items:
            if isinstance(item, bool) and kinds.isdisjoint({bool, Any}) and kinds & {int, float}:
                raise ValueError(f"expected {number}, got the truth value {str(item).lower()}")
            if isinstance(item, int | float) and not isinstance(item, bool) and kinds & {bool}:
                raise ValueError(f"expected true or false, got the number {item}")
            if isinstance(item, str) and kinds & {int, float, bool} and kinds.isdisjoint({str, Any}):
                expected = "true or false" if bool in kinds else number
                raise ValueError(f"expected {expected}, got the text {item[:80]!r}")
            if isinstance(item, str | Path) and Path in kinds:
                expanded(Path(item))
        return value

    @classmethod
    @cache
    def descriptions(cls) -> dict[str, str]:
        """Return the text that the source has below each field.

        Pydantic could keep it in the fields, but would then parse the source of every model at each start of a process.
        """
        found: dict[str, str] = {}
        for owner in reversed(cls.__mro__):
            if issubclass(owner, ConfigModel) and owner is not ConfigModel:
                found |= _texts_below_fields(owner)
        return {name: text for name, text in found.items() if name in cls.model_fields}

    def with_paths_from(self, directory: Path) -> Self:
        """Return the same configuration with every relative path resolved against `directory`."""
        resolved = {name: _absolute(value, directory) for name, value in self}
        return self.model_copy(
            update={name: resolved[name] for name, value in self if resolved[name] != value}
        )

    def sets(self, key: str) -> bool:
        """Return whether a file gave this key; what none gave is a default, which a host may replace."""
        return key in self.model_fields_set


# Pydantic asks for the signature of this check at every field of every section: a tenth of the time of a model.
_CHECK: Any = vars(ConfigModel)["_has_the_type_of_its_key"].__func__
_CHECK.__signature__ = inspect.signature(_CHECK)


def file_of_function(name: str) -> Path | None:
    """Return the file of a function of the user's, written path.py:function; None for a name of Flotilla's."""
    return Path(name.rpartition(":")[0]) if _FUNCTION.match(name) else None


def expanded(path: Path) -> Path:
    """Return the path with `~` resolved; a ValueError says why no file system can have it."""
    if longest := max((part for part in path.parts if len(part.encode()) > LONGEST_FILE_NAME), default=""):
        raise ValueError(
            f"the path has a name of {len(longest.encode())} bytes, and {LONGEST_FILE_NAME} is the limit"
        )
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path.parts[0]} in the path has no home directory: {error}") from None


def _absolute(value: Any, directory: Path) -> Any:
    if isinstance(value, ConfigModel):
        return value.with_paths_from(directory)
    if isinstance(value, Path):
        return value if str(value).startswith((HUB, TASKS)) else directory / expanded(value)
    if isinstance(value, tuple):
        return tuple(_absolute(item, directory) for item in value)
    if isinstance(value, dict):
        return {key: _absolute(item, directory) for key, item in value.items()}
    return value


def _texts_below_fields(model: type[ConfigModel]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(str(text.value.value))
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@cache
def _kinds(model: type[ConfigModel], key: str | None) -> frozenset[Any]:
    """Return the types of plain values that a key takes, directly or as items of its list or mapping."""
    found: set[Any] = set()
    pending: list[Any] = [model.model_fields[key].annotation] if key else []
    while pending:
        annotation = pending.pop()
        origin = typing.get_origin(annotation)
        if origin is dict:
            found.add(dict)
            pending.append(typing.get_args(annotation)[1])
        elif origin in (typing.Union, types.UnionType, tuple, typing.Annotated):
            pending.extend(typing.get_args(annotation))
        elif origin is typing.Literal:
            found.update(map(type, typing.get_args(annotation)))
        else:
            found.add(annotation)
    return frozenset(found)


def _fit_the_wire(parameters: dict[str, Any]) -> dict[str, Any]:
    for name, value in parameters.items():
        if problem := unfit(value, name):
            raise ValueError(problem)
    return parameters


def possible_function(name: str) -> str:
    """Return the name if a file system may have the file in it; raise ValueError otherwise."""
    file, colon, _ = name.rpartition(":")
    if colon and file.endswith(".py"):
        expanded(Path(file))
    return name


Parameters = Annotated[dict[str, Any], AfterValidator(_fit_the_wire)]
"""The arguments of a user's function or of a reward, in addition to its samples."""


class UserFunction(ConfigModel):
    """A function in one of the user's files."""

    type: Annotated[str, AfterValidator(possible_function)] = Field(pattern=PATTERN)
    """The function, written path.py:function."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the function by keyword."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the function."""
        return self.parameters

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"type": function_path(self.type, directory)})


def function_path(name: str, directory: Path) -> str:
    """Return `name` with its file resolved against `directory`; names of ours stay the same."""
    file, colon, function = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        return name
    return f"{directory / expanded(Path(file))}:{function}"


def kind_of(section: Any) -> Any:
    """Return the member of a union that a section is: `user` for a function of the user, else its type."""
    kind = section.get("type") if isinstance(section, dict) else getattr(section, "type", None)
    return "user" if isinstance(kind, str) and ":" in kind else kind


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class SecretReference(ConfigModel):
    """The place of a secret, which is read where the process starts: one of the three."""

    file: Path | None = None
    """File with the secret, for its owner alone (mode 0600)."""
    environment: str | None = None
    """Variable of the process that starts the service."""
    command: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=64)
    """Program with its arguments, which prints the secret; no shell reads it."""

    @model_validator(mode="after")
    def _has_one_place(self) -> SecretReference:
        if sum(place is not None for place in (self.file, self.environment, self.command)) != 1:
            raise ValueError("name one of file, environment and command")
        if self.environment is not None and not _VARIABLE.fullmatch(self.environment):
            # Not shown: it may be the secret itself, in the wrong place.
            raise ValueError("environment takes the name of a variable")
        return self


_OWN_VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "FLOTILLA_PROCESS")


def _fit_an_environment(values: dict[str, Any]) -> dict[str, Any]:
    """Check the names; no value is in any message, because it may be a secret."""
    for name in values:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a variable")
        if name in _OWN_VARIABLES:
            raise ValueError(f"{name} is set by the launcher, from the GPUs of the stack")
    return values


def _texts_or_references(values: object) -> object:
    if not isinstance(values, dict):
        raise ValueError("expected a mapping of variables to texts or references to secrets")
    for name, value in values.items():
        if not isinstance(value, str | dict | SecretReference):
            raise ValueError(f"{str(name)[:80]}: expected a text (in quotes) or a reference to a secret")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{str(name)[:80]}: a variable holds no NUL")
    return values


def _kind_of_value(value: object) -> str:
    return "text" if isinstance(value, str) else "reference"


EnvironmentValue = Annotated[
    Annotated[str, Tag("text")] | Annotated[SecretReference, Tag("reference")], Discriminator(_kind_of_value)
]
Environment = Annotated[
    dict[str, EnvironmentValue],
    BeforeValidator(_texts_or_references),
    AfterValidator(_fit_an_environment),
    Field(max_length=256),
]


class IsolationConfig(ConfigModel):
    """The jail that code of users runs in, on the host of a reward or environment replica."""

    at_least: Literal["landlock", "namespaces"] = "landlock"
    """The lowest level that is accepted; functions of users are refused on a host that has a lower one."""
    unsafe: bool = False
    """Run functions of users as the service itself, with all that it may read, write and reach."""
    memory_gib: float = Field(default=4.0, gt=0, le=4096)
    """Memory of each process of a function."""
    processes: int = Field(default=128, ge=1, le=65536)
    """Processes of a function at the same time."""
    readable: tuple[Path, ...] = Field(default=(), max_length=64)
    """Files and folders that functions may read beside their own folder and the packages of the service."""
    environment: tuple[str, ...] = Field(default=(), max_length=64)
    """Names of variables of the service that functions see."""
    preload: tuple[str, ...] | None = Field(default=None, max_length=64)
    """Names of modules that workers import once. Then each sample has a process of its own, forked from such a worker,
    and finds nothing that one before it left; `[]` imports nothing. Empty keeps a process from sample to sample."""
