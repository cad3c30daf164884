"""The protocol between the service and its workers: JSON objects with a length prefix, over private socket pairs.

Not over standard output: user code prints there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct(">I")
MAX_BYTES = 256 * 1024 * 1024


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message; raise `EOFError` where the other side is gone or speaks something else."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_BYTES:
        raise EOFError(f"a frame of {length} bytes: the other side does not speak this protocol")
    return _object(await reader.readexactly(length))


def receive(connection: socket.socket) -> dict[str, Any]:
    """The blocking twin of `read`."""
    (length,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size))
    return _object(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise EOFError("a frame that is not JSON: the other side does not speak this protocol") from error
    if not isinstance(message, dict):
        raise EOFError("a frame that is not an object: the other side does not speak this protocol")
    return message
