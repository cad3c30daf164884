"""The protocol between the service and its workers: one question, one answer, over a private socket pair.

Not over standard output: user code prints there.

Invariants: each question carries a fresh secret and its answer begins with it, so nothing that was written for another
question, by another process or by accident is ever taken for the answer. What follows is a JSON object with a length.
Nothing heavy is imported here: workers start with this.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

SECRET_BYTES = 16
HEAD = struct.Struct(f">{SECRET_BYTES}sI")
"""The secret of the question, and the length of the object behind it."""
MOST_ANSWER_BYTES = 1024 * 1024
"""The length of the longest answer, a message with a traceback among them."""
AT_ONCE = 1 << 16
"""The most that is read at once; with nothing behind a question, its head and all of it come together."""


class NoAnswer(Exception):
    """A worker wrote what cannot be the answer to its question; the message says why, of an "it"."""


def encode(secret: bytes, message: dict[str, Any]) -> bytes:
    """One question or answer."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(secret, len(body)) + body


def length_of_answer(head: bytes | bytearray, secret: bytes) -> int:
    """Return how many bytes follow the head of the answer to the question with this secret."""
    # Of the service alone.
    import hmac

    said, length = HEAD.unpack(head)
    if not hmac.compare_digest(said, secret):
        raise NoAnswer("it does not begin with the secret of the question")
    if length > MOST_ANSWER_BYTES:
        raise NoAnswer(f"it has {length} bytes, and an answer has at most {MOST_ANSWER_BYTES}")
    return int(length)


def decode_answer(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("it is not JSON") from error
    if not isinstance(message, dict):
        raise NoAnswer("it is not an object")
    return message


def receive_question(channel: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Return the next question with its secret; blocks until it is there."""
    told, secret, wanted = bytearray(), b"", HEAD.size
    while len(told) < wanted:
        part = channel.recv(AT_ONCE)
        if not part:
            raise EOFError("the other side closed the channel")
        told += part
        if len(told) >= HEAD.size:
            secret, length = HEAD.unpack_from(told)
            wanted = HEAD.size + length
    return secret, json.loads(told[HEAD.size :])
