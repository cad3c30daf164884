"""Finds out how the whole histories that a client sends go on from one another.

Invariants: a history that begins with all that a thread has heard and said goes on in this thread, and only what is new
is told. Any other is told whole: as the rewritten history of the thread of which it keeps a turn beyond the place where
the two part, or in a new thread where it keeps none. So branches of one history each go on in a thread of their own.
Messages are equal where they say the same, however a client spaces the JSON of a call. A turn that a client knows by
another text than its own, as where a text of `stop` ended it, stands in what is told as it was written. Of all other
messages a digest is kept, never the text, and the number of threads is bounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_THREADS = 64
"""The most threads; beyond them the one that was asked for the longest time ago is rewritten."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """The thread in which a history goes on."""

    thread: str
    messages: tuple[Message, ...]
    """The messages that are new to the thread, or the whole history where it is afresh."""
    afresh: bool


@dataclass(eq=False)
class _Thread:
    name: str
    history: list[bytes]
    """A digest of each message that it heard or said."""
    said: set[bytes] = field(default_factory=set)
    """The digests of the policy's turns."""

    def common(self, history: Sequence[bytes]) -> int:
        """Return with how many messages of its own another history begins."""
        count = 0
        for own, other in zip(self.history, history, strict=False):
            if own != other:
                break
            count += 1
        return count


class Histories:
    """The threads of one session."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        """The one that was asked last is the last."""
        self._made = 0
        self._heard: tuple[_Thread, list[bytes]] | None = None
        """The thread and the history to which the next turn is said."""
        self._own: dict[bytes, Message] = {}
        """The turns of which clients know another text, by the digests of those."""

    def hear(self, messages: Sequence[Message]) -> Place:
        """Return where a history goes on; its thread has heard it once `say` has its turn."""
        history = [_digest(message) for message in messages]
        messages = [self._own.get(digest, one) for digest, one in zip(history, messages, strict=True)]
        thread = self._that_goes_on(history)
        if thread is not None:
            place = Place(thread.name, tuple(messages[len(thread.history) :]), afresh=False)
        else:
            thread = self._that_is_rewritten(history)
            afresh = thread is not None
            if thread is None:
                thread = _Thread(str(self._made + 1) if self._made else "", [])
            place = Place(thread.name, tuple(messages), afresh)
        self._heard = thread, history
        return place

    def say(self, message: Message, own: Message | None = None) -> None:
        """Take the turn of the policy after what was heard last; `own` is what it wrote, where a client knows less."""
        assert self._heard is not None, "a turn answers what was heard"
        (thread, history), digest = self._heard, _digest(message)
        if own is not None and own != message:
            self._own[digest] = own
        self._made += thread not in self._threads
        self._threads = [*(one for one in self._threads if one is not thread), thread]
        thread.history = [*history, digest]
        thread.said.add(digest)

    def _that_goes_on(self, history: list[bytes]) -> _Thread | None:
        """Return the thread of which all is there, and more; the longest of several."""
        found = [
            one
            for one in self._threads
            if len(one.history) < len(history) and one.common(history) == len(one.history)
        ]
        return max(found, key=lambda one: len(one.history), default=None)

    def _that_is_rewritten(self, history: list[bytes]) -> _Thread | None:
        """Return the thread whose turns a history keeps; None where it is to have a thread of its own."""
        common = {one.name: one.common(history) for one in self._threads}
        # What the two begin with is no sign: a branch, and a sub-agent with the same instructions, begin alike.
        kept = {one.name: len(one.said.intersection(history[common[one.name] :])) for one in self._threads}
        keep = [one for one in reversed(self._threads) if kept[one.name]]
        if keep and len(history) not in common.values():  # else it was asked before, and its way on is kept
            return max(keep, key=lambda one: (kept[one.name], common[one.name]))
        return self._threads[0] if len(self._threads) >= MOST_THREADS else None


def _digest(message: Message) -> bytes:
    """Return what is equal for messages that say the same."""
    plain = {name: value for name, value in message.items() if value}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [call | {"arguments": _value(call.get("arguments") or "{}")} for call in calls]
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).digest()


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
