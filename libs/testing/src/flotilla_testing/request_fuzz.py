"""Requests that no client should send, drawn from the descriptors of the contract.

Half of them are one field away from a request that is valid, the others are drawn field by field. Invariants: the same
seed draws the same requests; whatever a service would obey to its end (its own stop, a thousand replicas, a file of the
machine) is not among them: those fields keep a value that is refused, and texts name no file that exists.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from flotilla.common.v1 import tensor_pb2

Draft = Callable[[int], Sequence[Message]]
"""The messages of a valid call, by a number that is new each time: one, or those of a stream."""
Pin = tuple[str, Sequence[Any]]

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 7, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 7, 2**31, 2**53, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 7, 1000, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 7, 1000, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
}
_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1.0, 5e-324, 1e30, 1.7e308, -1.7e308)
_TEXTS = (
    "",
    " ",
    "a",
    "latest",
    "step-000001",
    "0",
    "-1",
    "1e999",
    "nowhere/model",
    "nowhere.py:function",
    "..",
    "a\0b",
    "a\nb\x1b[2J",
    "\u202eabc\ufffd\U0001f600",
    "{}",
    "steps: [",
    "a=b",
    "steps=.nan",
    "%s%n{0}",
    "x" * 300,
    "y" * 5000,
    "z" * 100_000,
)
_BYTES = (b"", b"\0", b"\0" * 7, b"\xff" * 8, b"\0\0\xc0\x7f", b"x" * 4096)
_DEEPEST = 4


class RequestFuzz:
    """Draws the requests of a service's methods."""

    def __init__(
        self, seed: int, drafts: Mapping[str, Draft], pins: Mapping[str, Sequence[Pin]] | None = None
    ) -> None:
        """`drafts` and `pins` go by a method's full name; a pin holds a field of its request to some values."""
        self._random = random.Random(seed)
        self._drafts = drafts
        self._pins = pins or {}
        self._number = 0

    def of(self, method: MethodDescriptor) -> list[bytes]:
        """Return the next request of a method: the serialized messages of the call."""
        self._number += 1
        pins = self._pins.get(method.full_name, ())
        draft = self._drafts.get(method.full_name)
        kind = GetMessageClass(method.input_type)
        if draft is not None and self._random.random() < 0.5:
            messages = [_copy(message) for message in draft(self._number)]
            self._spoil_one_field(self._random.choice(messages))
        else:
            count = self._random.randint(0, 3) if method.client_streaming else 1
            messages = [self._drawn(kind(), 0) for _ in range(count)]
        for message in messages:
            for name, values in pins:
                _assign(message, message.DESCRIPTOR.fields_by_name[name], self._random.choice(values))
        serialized = [message.SerializeToString() for message in messages]
        if not pins and serialized and self._random.random() < 0.05:
            serialized[-1] = self._garbled(serialized[-1])
        return serialized

    def _drawn(self, message: Message, depth: int) -> Message:
        """Fill a message: about half of its fields, one of each oneof."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.5:
                self._set(message, field, depth)
        return message

    def _spoil_one_field(self, message: Message) -> None:
        """Give another value to one field, wherever it lies."""
        places = list(_places(message))
        owner, field = self._random.choice(places) if places else (message, None)
        if field is None:
            return
        if self._random.random() < 0.15:
            owner.ClearField(field.name)
        else:
            self._set(owner, field, _DEEPEST - 1)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(message, field, depth)
        elif field.is_repeated:
            message.ClearField(field.name)
            entries = getattr(message, field.name)
            for _ in range(self._random.choice((0, 1, 1, 2, 5))):
                if field.message_type is None:
                    entries.append(self._value(field))
                elif depth < _DEEPEST:
                    self._drawn(entries.add(), depth + 1)
        elif field.message_type is None:
            _assign(message, field, self._value(field))
        else:
            part = getattr(message, field.name)
            part.SetInParent()
            if depth < _DEEPEST:
                self._drawn(part, depth + 1)
                if isinstance(part, tensor_pb2.Tensor) and self._random.random() < 0.5:
                    part.CopyFrom(tensor_pb2.Tensor(data=b"\1\0\0\0" * 3, dtype=tensor_pb2.DATA_TYPE_INT32))

    def _set_map(self, message: Message, field: Any, depth: int) -> None:
        entries, value = getattr(message, field.name), field.message_type.fields_by_name["value"]
        for _ in range(self._random.randint(0, 2)):
            key = self._random.choice(_TEXTS)
            if value.message_type is None:
                entries[key] = self._value(value)
            elif depth < _DEEPEST + 3:
                self._drawn(entries[key], depth + 1)

    def _value(self, field: Any) -> Any:
        kind, choice = field.cpp_type, self._random.choice
        if kind in _INTEGERS:
            return choice(_INTEGERS[kind])
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return choice((*field.enum_type.values_by_number, -1, 99, 2**31 - 1))
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return choice(_FLOATS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return choice((False, True))
        return choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)

    def _garbled(self, data: bytes) -> bytes:
        """Cut a message, or turn some of its bits."""
        changed = bytearray(data[: self._random.randint(0, len(data))] or b"\xff")
        for _ in range(self._random.randint(0, 3)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


# The stubs of protobuf know two classes of field descriptors: fields are left without a type.
def _places(message: Message) -> Iterator[tuple[Message, Any]]:
    """Every field of a message and of what lies in it."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for part in getattr(message, field.name):
                yield from _places(part)
        elif message.HasField(field.name):
            yield from _places(getattr(message, field.name))


def _assign(message: Message, field: Any, value: Any) -> None:
    if isinstance(value, Message):
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
