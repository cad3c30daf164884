"""The keys and values of one epoch, and the store of torch that a member asks for them.

A value is kept in one of two ways. What is `set` is the same for all and is kept for good, so every answer to a member
brings what was set since its last one, and a member finds it in its own copy. A count, which `add` makes, is asked for
each time. A key that is removed is gone for a member with its next answer.

Invariants: a value that is set once is the same for every member from then on; no question waits longer than its limit;
a table whose server has ended answers with an error.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch._C._distributed_c10d import Store

SLICE_S = 0.05
"""The longest wait of one question: an abort of this end is seen between two of them."""
PAUSE_S = 0.001
"""The pause between two slices: locks are not fair, and another thread may want to say something."""
_MOST_TOLD_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">Bqd")


class StoreError(RuntimeError):
    """Says that a store cannot answer, as torch expects it."""


class Verb(IntEnum):
    """The kinds of questions to a table."""

    SET = 1
    WAIT = 2
    READ = 3
    ADD = 4
    SWAP = 5
    REMOVE = 6
    COUNT = 7


class Question(NamedTuple):
    """One question of a member."""

    verb: Verb
    keys: tuple[str, ...] = ()
    value: bytes = b""
    number: int = 0
    limit_s: float = 0.0

    def encoded(self) -> bytes:
        """Return it as a message."""
        head = _HEAD.pack(self.verb, self.number, self.limit_s)
        return packed([head, self.value, *(key.encode() for key in self.keys)])

    @classmethod
    def decoded(cls, message: bytes) -> Question:
        """Read a message; raise ValueError where it is none."""
        head, value, *keys = unpacked(message)
        try:
            verb, number, limit_s = _HEAD.unpack(head)
        except struct.error as error:
            raise ValueError(str(error)) from error
        return cls(Verb(verb), tuple(key.decode() for key in keys), value, number, limit_s)


class Answer(NamedTuple):
    """Whether it is so, with a value or a number."""

    yes: bool
    value: bytes = b""


class Desk(Protocol):
    """The place at which a member asks."""

    @property
    def values(self) -> Mapping[str, bytes]:
        """Return what was set, as far as it is known here."""

    def ask(self, question: Question) -> Answer:
        """Return the answer, which takes no longer than the limit of the question; raise StoreError."""


class Table:
    """The keys and values, and the desk of the process that has them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._told: list[bytes] = []
        """The entries that were set and removed, in order, as the members hear of them."""
        self._changed = threading.Condition()
        self._ended = False
        self.on_change: Callable[[], None] = lambda: None
        """Called after a change, by the thread that made it."""

    def ask(self, question: Question) -> Answer:
        with self._changed:
            if question.verb is Verb.WAIT:
                self._changed.wait_for(lambda: self._ended or self.has(question.keys), question.limit_s)
            if self._ended:
                raise StoreError("the store of the weight group is closed")
        return self.answer(question)

    def answer(self, question: Question) -> Answer:
        """Return the answer as of now."""
        verb, keys = question.verb, question.keys
        key = keys[0] if keys else ""
        with self._changed:
            if verb is Verb.WAIT:
                return Answer(self.has(keys))
            if verb is Verb.READ:
                value = self._value(key)
                return Answer(value is not None, value or b"")
            if verb is Verb.COUNT:
                return Answer(True, b"%d" % (len(self.values) + len(self._counts)))
            answer = self._change(verb, key, question)
            self._changed.notify_all()
        self.on_change()
        return answer

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of them exist."""
        return all(key in self.values or key in self._counts for key in keys)

    def told_since(self, position: int) -> list[bytes]:
        """Return what a member that has heard `position` entries has to hear; the rest comes with its next answer."""
        told, nbytes = [], 0
        for entry in self._told[position:]:
            told.append(entry)
            nbytes += len(entry)
            if nbytes > _MOST_TOLD_BYTES:
                break
        return told

    def end(self) -> None:
        """Answer nothing any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _value(self, key: str) -> bytes | None:
        if key in self._counts:
            return b"%d" % self._counts[key]
        return self.values.get(key)

    def _change(self, verb: Verb, key: str, question: Question) -> Answer:
        if key in (self.values if verb is Verb.ADD else self._counts) and verb is not Verb.REMOVE:
            raise StoreError(f"{key} is either set or counted, and not both")
        if verb is Verb.ADD:
            self._counts[key] = self._counts.get(key, 0) + question.number
            return Answer(True, b"%d" % self._counts[key])
        if verb is Verb.REMOVE:
            existed = self._counts.pop(key, None) is not None
            if self.values.pop(key, None) is not None:
                self._told.append(packed([key.encode()]))
                existed = True
            return Answer(existed)
        value = question.value
        if verb is Verb.SWAP:
            expected, value = unpacked(value)
            held = self._value(key)
            # As TCPStore does: a key that is not there has no value, which the empty one stands for.
            if (held or b"") != expected:
                return Answer(False, expected if held is None else held)
        self.values[key] = value
        self._told.append(packed([key.encode(), value]))
        return Answer(True, value)


class EpochStore(Store):
    """The store as torch and the members of a group know it."""

    def __init__(self, desk: Desk, timeout_s: float) -> None:
        super().__init__()
        self.desk = desk
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self.desk.ask(Question(Verb.SET, (key,), _bytes(value)))

    def get(self, key: str) -> bytes:
        """Return the value, for which it waits."""
        while (value := self.desk.values.get(key)) is None:
            read = self.desk.ask(Question(Verb.READ, (key,)))
            if read.yes:
                return read.value
            self.wait([key])
        return value

    def add(self, key: str, value: int) -> int:
        return int(self.desk.ask(Question(Verb.ADD, (key,), number=value)).value)

    def check(self, keys: list[str]) -> bool:
        return self.wait_a_while(keys, 0.0)

    def wait_a_while(self, keys: Sequence[str], limit_s: float) -> bool:
        """Wait until all of them exist, for so long at most; return whether they do."""
        unknown = tuple(key for key in keys if key not in self.desk.values)
        return not unknown or self.desk.ask(Question(Verb.WAIT, unknown, limit_s=limit_s)).yes

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        ends = time.monotonic() + limit_s
        while not self.wait_a_while(keys, max(0.0, min(SLICE_S, ends - time.monotonic()))):
            if time.monotonic() >= ends:
                raise StoreError(f"no {' or '.join(keys)[:200]} in the store within {limit_s:g} s")
            time.sleep(PAUSE_S)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        swap = packed([_bytes(expected_value), _bytes(desired_value)])
        return self.desk.ask(Question(Verb.SWAP, (key,), swap)).value

    def delete_key(self, key: str) -> bool:
        return self.desk.ask(Question(Verb.REMOVE, (key,))).yes

    def num_keys(self) -> int:
        return int(self.desk.ask(Question(Verb.COUNT)).value)

    def clone(self) -> EpochStore:
        """Return itself: any thread may ask it."""
        return self


def packed(parts: Iterable[bytes]) -> bytes:
    """Return byte strings as one."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(message: bytes) -> list[bytes]:
    """Return the byte strings of `packed`; raise ValueError where the message is none."""
    parts, at = [], 0
    while at < len(message):
        begin = at + _LENGTH.size
        if begin > len(message):
            raise ValueError("the message is cut")
        end = begin + _LENGTH.unpack_from(message, at)[0]
        if end > len(message):
            raise ValueError("the message is cut")
        parts.append(message[begin:end])
        at = end
    return parts


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
