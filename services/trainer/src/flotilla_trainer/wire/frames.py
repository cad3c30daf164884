"""Frames between the front and its ranks: a small header and the bytes of arrays, over one socket pair a rank.

Invariants: a frame is two lengths, a JSON header and the arrays' little-endian bytes in the header's order; nothing is
pickled, so a confused rank can send wrong numbers but never code; both ends use this module and no other.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LENGTHS = struct.Struct("<IQ")
PREFIX_BYTES = _LENGTHS.size

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Frame:
    """One message. Answers carry the `number` of the command that they answer."""

    kind: str
    number: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


def encode(frame: Frame) -> list[bytes | memoryview]:
    """The frame as buffers to be written one after the other; array bytes are not copied."""
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    header = json.dumps(
        {
            "kind": frame.kind,
            "number": frame.number,
            "fields": frame.fields,
            "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
        }
    ).encode()
    body = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
    size = sum(part.nbytes for part in body)
    return [_LENGTHS.pack(len(header), size) + header, *body]


def lengths(prefix: bytes | bytearray) -> tuple[int, int]:
    """Return how many bytes of header and of arrays follow a frame's first `PREFIX_BYTES`."""
    header_bytes, body_bytes = _LENGTHS.unpack(prefix)
    return header_bytes, body_bytes


def decode(header: bytes | bytearray, body: bytes | bytearray) -> Frame:
    """The frame; its arrays are views of `body`."""
    content = json.loads(header)
    arrays: dict[str, Array] = {}
    offset = 0
    for name, dtype, shape in content["arrays"]:
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, kind, count, offset).reshape(shape)
        offset += count * kind.itemsize
    return Frame(content["kind"], content["number"], content["fields"], arrays)
