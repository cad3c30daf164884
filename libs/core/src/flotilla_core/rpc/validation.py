"""Requests against the rules of their contract, before a handler sees them.

Rules hold for every field (see `flotilla/common/v1/rules.proto`), and a field's options may add to them. Invariants:
a refusal names the field by its path and says what it may hold. A handler gets known enum values, finite numbers that
fit into 63 bits and durations that a timer can wait for. Names fit into a path or a line of a log. The walk over a
type of message is compiled once and skips whatever has no rule: bytes cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from flotilla.common.v1 import rules_pb2
from flotilla_core.errors import InvalidRequest

LONGEST_NAME = 4096
LONGEST_DURATION_S = 10 * 366 * 24 * 3600
MOST_ENTRIES = 1_000_000
_OURS = "flotilla."
_SHOWN = 80
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_LARGEST_INTEGER = 2**63 - 1

_Check = Callable[[Any], None]
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)


class _Fault(Exception):
    """A value that a field may not hold; the path grows from the field to the request."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path = ""

    def below(self, name: str) -> _Fault:
        separator = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{name}{separator}{self.path}"
        return self


def validate(request: Any, method: str) -> None:
    """Raise InvalidRequest for a request of our contract with a value that breaks a rule."""
    check = _message_check(request.DESCRIPTOR) if request.DESCRIPTOR.full_name.startswith(_OURS) else None
    if check is None:
        return
    try:
        check(request)
    except _Fault as fault:
        raise InvalidRequest(f"{fault.path} {fault}", where=method) from None


@cache
def _message_check(descriptor: Descriptor) -> _Check | None:
    """Return the check of a type of message, or None where nothing in it can be wrong."""
    special = _WELL_KNOWN.get(descriptor.full_name)
    if special is not None:
        return special
    checks = [(field.name, check) for field in descriptor.fields if (check := _field_check(field))]
    if not checks:
        return None

    def check_message(message: Any) -> None:
        for name, check in checks:
            try:
                check(message)
            except _Fault as fault:
                raise fault.below(name) from None

    return check_message


def _field_check(field: FieldDescriptor) -> _Check | None:
    """Return the check of a field of a message, or None where it can hold no wrong value."""
    check = _value_check(field)
    if check is None:
        return None
    name = field.name
    if field.is_repeated:

        def check_entries(message: Any) -> None:
            entries = getattr(message, name)
            if len(entries) > MOST_ENTRIES:
                raise _Fault(f"has {len(entries)} entries, and at most {MOST_ENTRIES} are taken")
            for index, value in enumerate(entries):
                try:
                    check(value)
                except _Fault as fault:
                    raise fault.below(f"[{index}]") from None

        return check_entries
    if field.has_presence:

        def check_present(message: Any) -> None:
            if message.HasField(name):
                check(getattr(message, name))

        return check_present
    return lambda message: check(getattr(message, name))


def _value_check(field: FieldDescriptor) -> _Check | None:
    """Return the check of one value of a field."""
    rules: rules_pb2.FieldRules = field.GetOptions().Extensions[rules_pb2.rules]
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return _message_check(field.message_type)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return _enum_check(field)
    if kind == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_STRING:
        return None if rules.free_text else _check_name
    if kind in _FLOATS or kind in _INTEGERS:
        return _number_check(field, rules)
    return None


def _enum_check(field: FieldDescriptor) -> _Check:
    kind = field.enum_type
    assert kind is not None, "only called for enums"
    known, name = frozenset(kind.values_by_number), kind.name

    def check(value: int) -> None:
        if value not in known:
            raise _Fault(f"is {value}, which is no value of {name}")

    return check


def _number_check(field: FieldDescriptor, rules: rules_pb2.FieldRules) -> _Check | None:
    least = rules.least if rules.HasField("least") else -math.inf
    most = rules.most if rules.HasField("most") else math.inf
    if field.type == FieldDescriptor.TYPE_UINT64 and not rules.all_bits:
        most = min(most, _LARGEST_INTEGER)
    is_float = field.cpp_type in _FLOATS
    if not is_float and (least, most) == (-math.inf, math.inf):
        return None

    def check(value: float) -> None:
        if is_float and not math.isfinite(value):
            raise _Fault(f"is {value}, not a finite number")
        if not least <= value <= most:
            limits = f"at most {most:.15g}" if least == -math.inf else f"between {least:.15g} and {most:.15g}"
            raise _Fault(f"is {value}; it may be {limits}")

    return check


def _check_name(value: str) -> None:
    if len(value) > LONGEST_NAME:
        raise _Fault(f"has {len(value)} characters, and at most {LONGEST_NAME} are taken")
    if not value.isprintable() and _CONTROL.search(value):
        raise _Fault(f"holds a control character: {value[:_SHOWN]!r}")


def _check_duration(duration: Any) -> None:
    seconds, nanos = duration.seconds, duration.nanos
    if seconds < 0 or nanos < 0 or nanos >= 1_000_000_000 or seconds > LONGEST_DURATION_S:
        raise _Fault(f"is {seconds} s and {nanos} ns; a duration is between 0 and {LONGEST_DURATION_S} s")


def _check_struct(struct: Any) -> None:
    for key, value in struct.fields.items():
        try:
            _check_struct_value(value)
        except _Fault as fault:
            raise fault.below(key[:_SHOWN]) from None


def _check_struct_value(value: Any) -> None:
    kind = value.WhichOneof("kind")
    if kind == "number_value" and not math.isfinite(value.number_value):
        raise _Fault(f"is {value.number_value}, not a finite number")
    if kind == "struct_value":
        _check_struct(value.struct_value)
    elif kind == "list_value":
        for index, item in enumerate(value.list_value.values):
            try:
                _check_struct_value(item)
            except _Fault as fault:
                raise fault.below(f"[{index}]") from None
    elif kind is None or (kind == "null_value" and value.null_value != 0):
        raise _Fault("holds no value")


_WELL_KNOWN: dict[str, _Check] = {
    "google.protobuf.Duration": _check_duration,
    "google.protobuf.Struct": _check_struct,
}
