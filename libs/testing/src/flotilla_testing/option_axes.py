"""Every value that a section of a configuration can take, found in its models, to be tried against every other.

Invariant: a key that the models gain is found by itself; a number, which has no list of values, is looked up, and where
nobody named values for it the look-up says so.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Settings = dict[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One key at a value that is not its default."""

    key: str
    value: Any
    needs: tuple[Settings, ...] = ({},)
    """Settings without which the key means nothing: any one of these is enough, the first is the usual one."""
    beside: Settings = field(default_factory=dict)
    """Settings that make it large enough to be seen; any other choice may change them."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    @cached_property
    def settings(self) -> Settings:
        """The choice as it stands alone."""
        return {**self.beside, **self.needs[0], self.key: self.value}


def document(settings: Settings) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        inner = made
        for section in sections:
            inner = inner.setdefault(section, {})
        # A section that is written empty may be filled by another key.
        if not (value == {} and isinstance(inner.get(last), dict)):
            inner[last] = dict(value) if isinstance(value, dict) else value
    return made


@dataclass(frozen=True)
class Axes:
    """The choices of a section of the configuration."""

    values: Mapping[str, Sequence[Any]]
    """Values for what has no list of its own, by key, for one of several types by key and type
    (`algorithm.loss.clip_low of ppo`)."""
    needs: Mapping[str, Sequence[Settings]]
    """Settings that a choice needs to mean anything, by the same names, also with a value (`key=value`)."""
    beside: Mapping[str, Settings]
    """Settings that let the effect of a choice be seen, by the same names."""
    outside: Mapping[str, str]
    """Keys that are no axis, and why."""

    def choices(self, model: type[BaseModel], prefix: str) -> list[Choice]:
        """Return every choice below a section."""
        return list(self._of_model(model, prefix, {}, ""))

    def _of_model(self, model: type[BaseModel], prefix: str, given: Settings, kind: str) -> Iterator[Choice]:
        for name, info in model.model_fields.items():
            key = f"{prefix}.{name}"
            if key not in self.outside:
                yield from self._of_field(key, info, given, kind)

    def _of_field(self, key: str, field: FieldInfo, given: Settings, kind: str) -> Iterator[Choice]:
        members = _members(field)
        if members:
            shared = set.intersection(*(set(member.model_fields) for member in members)) - {"type"}
            for member in members:
                yield from self._of_member(key, member, shared, field.get_default(call_default_factory=True))
            yield from self._of_shared(key, members[0], shared)
            return
        for section in _sections(field.annotation):
            if field.default is None:
                alone = self._choice(key, {}, given, kind)
                yield alone
                given = alone.settings
            yield from self._of_model(section, key, given, kind)
            return
        yield from (self._choice(key, value, given, kind) for value in self._values(key, field, kind))

    def _of_member(
        self, key: str, member: type[BaseModel], shared: set[str], default: BaseModel
    ) -> Iterator[Choice]:
        """A member of a union that is told apart by its type, and the keys that it has for itself."""
        kind = _type_of(member) or self.values[f"{key}.type"][0]
        alone = self._choice(f"{key}.type", kind, {}, "")
        if kind != default.type:  # type: ignore[attr-defined]
            yield alone
        given = {f"{key}.type": kind, **alone.needs[0]}
        for name, info in member.model_fields.items():
            if name != "type" and name not in shared:
                yield from self._of_field(f"{key}.{name}", info, given, kind)

    def _of_shared(self, key: str, member: type[BaseModel], shared: set[str]) -> Iterator[Choice]:
        for name, info in member.model_fields.items():
            if name in shared and f"{key}.{name}" not in self.outside:
                yield from self._of_field(f"{key}.{name}", info, {}, "")

    def _choice(self, key: str, value: Any, given: Settings, kind: str) -> Choice:
        names = [f"{key}={value}", f"{key} of {kind}", key]
        needs = next((self.needs[name] for name in names if name in self.needs), ({},))
        beside = next((self.beside[name] for name in names if name in self.beside), {})
        of_type = self.beside.get(f"{key.rpartition('.')[0]}.type={kind}", {})
        return Choice(key, value, tuple({**given, **more} for more in needs), {**of_type, **beside})

    def _values(self, key: str, field: FieldInfo, kind: str) -> Iterator[Any]:
        for name in (f"{key} of {kind}", key):
            if name in self.values:
                yield from self.values[name]
                return
        listed = _listed(field.annotation)
        if listed is None:
            of_kind = f" of {kind}" if kind else ""
            raise LookupError(
                f"{key}{of_kind} is an option that nobody tries: write its formula into flotilla_testing.exact_update, "
                "and a value that is not its default into the axes of the test of option pairs"
            )
        yield from (value for value in listed if value != field.default)


def _listed(annotation: Any) -> Sequence[Any] | None:
    """Return the values of what has a list of them."""
    if annotation is bool:
        return (False, True)
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return None


def _arguments(annotation: Any) -> Sequence[Any]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the section that a field holds, where it holds one."""
    parts = _arguments(annotation)
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _members(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the members of a union of sections that are told apart by `type`."""
    tagged = [part for part in _arguments(field.annotation) if typing.get_origin(part) is Annotated]
    return [typing.get_args(part)[0] for part in tagged]


def _type_of(member: type[BaseModel]) -> str | None:
    """Return its name; None if the user gives one."""
    field = member.model_fields["type"]
    return None if field.is_required() else field.default
