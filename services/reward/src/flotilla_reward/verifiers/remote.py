"""Objects of one process in another: a program and its tests use those of each other.

Invariants: plain values cross as copies, of the builtin types alone; any other object stays where it is, and the other
side has a `Remote` of it. What compares a `Remote` with a plain value is never asked of the side that has the object:
such a comparison is false, and arithmetic with it is an error. So no object decides that it equals a plain value. Only
the standard library is imported here: a jail starts with this.
"""

from __future__ import annotations

import builtins
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Collection
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from queue import SimpleQueue
from typing import Any, cast

DEEPEST = 100
LARGEST_PLAIN = 1 << 53
LONGEST_NUMBER = 1 << 16
"""The most digits of a Decimal and bits of each part of a Fraction: to make a longer one takes long."""
ROOT = 0
"""The number of the object that is there from the beginning."""

UNARY: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
    "__abs__": abs,
    "__neg__": operator.neg,
    "__round__": round,
    "__str__": str,
    "__repr__": repr,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__enter__": lambda manager: type(manager).__enter__(manager),
    "__instancecheck__": lambda kind, one: isinstance(one, kind),
}
"""Operations on one object. `in` is none of them: it iterates, so that the side that asks compares."""
BINARY: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
"""Operations that are asked of the side that has the objects, where it has both."""


class Ended(Exception):
    """An exception of the other side that has no class here, such as an exit."""


class Peer:
    """One of two processes, whose work runs in a thread; by `answer` it takes turns with the other one."""

    def __init__(self, root: object = None, shows: Collection[str] | None = ()) -> None:
        self._objects: list[Any] = [root]
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._kinds: dict[str, type[Exception]] = {}
        self._shows = shows
        """Modules: the other side looks into instances of their classes alone, at public names; None shows all."""
        self._inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._outbox: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def answer(self, said: dict[str, Any]) -> dict[str, Any]:
        """Pass on what the other side said, and return what this one says next."""
        self._inbox.put(said)
        return self._outbox.get()

    def tell(self, message: dict[str, Any]) -> None:
        """Say something that needs no answer, and wait until it was taken."""
        self._outbox.put(message)
        self._inbox.get()

    def serve(self) -> None:
        """Do what the other side asks, for ever; a process that was forked meanwhile ends where it comes back."""
        process_id, leave = os.getpid(), os._exit
        while True:
            said = self._done(self._inbox.get()["asks"])
            if os.getpid() != process_id:
                leave(0)
            self._outbox.put(said)

    def ask(self, operation: str, of: Any, *arguments: Any, **keywords: Any) -> Any:
        """Have the other side do something with an object of its own; what it asks meanwhile is done here."""
        packed = [self.pack(one) for one in arguments]
        asked = {"operation": operation, "of": of, "arguments": packed, "keywords": self.pack(keywords)}
        self._outbox.put({"asks": asked})
        while "asks" in (said := self._inbox.get()):
            self._outbox.put(self._done(said["asks"]))
        for at, changed in said.get("changed", ()):
            _become(arguments[at], self.unpack(changed))
        if "raised" in said:
            raise self._exception(operation, said["raised"], said["text"])
        return self.unpack(said["says"])

    def _done(self, asked: dict[str, Any]) -> dict[str, Any]:
        arguments: list[Any] = []
        try:
            arguments = [self.unpack(one) for one in asked["arguments"]]
            result = self._do(asked["operation"], asked["of"], arguments, self.unpack(asked["keywords"]))
            said: dict[str, Any] = {"says": self.pack(result)}
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is told to its tests
            said = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text_of(error)}
        try:
            packed = [(at, self.pack(one)) for at, one in enumerate(arguments) if isinstance(one, MUTABLE)]
        except ValueError:
            return said
        return said | {"changed": [(at, one) for at, one in packed if one != asked["arguments"][at]]}

    def _do(self, operation: str, of: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        found = self._objects[of]
        if operation in ("get", "set"):
            name = arguments[0]
            # A generator, for one, has a frame, and by that all that there is.
            if self._shows is not None and (
                name.startswith("_") or type(found).__module__ not in self._shows
            ):
                raise AttributeError(name)
            return getattr(found, name) if operation == "get" else setattr(found, *arguments)
        if operation == "call":
            return found(*arguments, **keywords)
        return (UNARY | BINARY)[operation](found, *arguments)

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Return a value as JSON."""
        if depth > DEEPEST:
            raise ValueError("a value is nested too deeply")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):
            return _number(value)
        if isinstance(value, list):
            return [self.pack(one, depth + 1) for one in value]
        for name, (kind, parts, _) in PLAIN.items():
            if isinstance(value, kind):
                return {name: self.pack(parts(value), depth + 1)}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.pack(value.tolist(), depth + 1)
        return self._reference(value)

    def _reference(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"exception": [kind.__name__ for kind in value.__mro__]}
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"mine": number}

    def unpack(self, said: Any) -> Any:
        """Return the value that JSON stands for."""
        if isinstance(said, list):
            return [self.unpack(one) for one in said]
        if not isinstance(said, dict):
            return said
        ((kind, content),) = said.items()
        if kind == "mine":
            return self._remotes.setdefault(content, Remote(self, content))
        if kind == "yours":
            return self._objects[content]
        if kind == "exception":
            return self._kind_of(content)
        return unpacked(kind, content, self.unpack)

    def _kind_of(self, names: list[str]) -> type[Exception]:
        """Return our class for an exception of theirs; none of what ends a process, or a test as skipped."""
        known = (getattr(builtins, name, None) for name in names)
        base = next((one for one in known if isinstance(one, type) and issubclass(one, Exception)), Ended)
        if base.__name__ == names[0]:
            return base
        made = cast("type[Exception]", type(names[0], (base,), {}))
        return self._kinds.setdefault(names[0], made)

    def _exception(self, operation: str, names: list[str], text: str) -> Exception:
        kind = self._kind_of(names)
        if issubclass(kind, StopIteration) and operation != "__next__":
            # As in a generator: an iteration that calls a function is not ended by it.
            return RuntimeError(f"{names[0]}: {text}")
        if issubclass(kind, UnicodeError):  # Some are made of more than a text.
            own = {"__init__": lambda *_: None, "__str__": lambda _: text}
            kind = cast("type[Exception]", type(kind.__name__, (kind,), own))
        try:
            return kind(text)
        except TypeError:
            return Ended(f"{names[0]}: {text}")


def _as_decimal(said: Any) -> Decimal:
    if not isinstance(said, str) or len(said) > LONGEST_NUMBER:
        raise ValueError("no text of a number, or too long")
    return Decimal(said)


def _as_fraction(parts: Any) -> Fraction:
    above, below = parts
    if any(type(one) is not int or one.bit_length() > LONGEST_NUMBER for one in parts):
        raise ValueError("no integers, or too long")
    return Fraction(above, below)


MUTABLE = (list, dict, set)
PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "deque": (deque, list, deque),
    "Decimal": (Decimal, str, _as_decimal),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], _as_fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
}
"""Values that JSON has no notation for: their type, its parts, and the value of these."""


def _number(value: float) -> Any:
    if isinstance(value, int):
        return value if abs(value) < LARGEST_PLAIN else {"int": hex(value)}
    return value if math.isfinite(value) else {"float": repr(float(value))}


def unpacked(kind: str, content: Any, unpack: Callable[[Any], Any]) -> Any:
    """Return a value that JSON has no notation for."""
    if kind == "int":
        return int(content, 16)
    return float(content) if kind == "float" else PLAIN[kind][2](unpack(content))


class Remote:
    """An object of the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        # What protocols of Python and of pytest look for is none of the tests' doing.
        if name.startswith("_") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("call", self._number, *arguments, **keywords)

    def __exit__(self, *_: object) -> None:
        self._peer.ask("get", self._number, "__exit__")(None, None, None)

    def __hash__(self) -> int:
        return hash(self._number)


def _unary(name: str) -> Callable[..., Any]:
    def asked(self: Remote, *arguments: Any) -> Any:
        return self._peer.ask(name, self._number, *arguments)

    return asked


def _binary(name: str) -> Callable[..., Any]:
    def asked(self: Remote, other: Any) -> Any:
        if type(other) is not Remote:
            return NotImplemented
        return self._peer.ask(name, self._number, other)

    return asked


for _name in UNARY:
    setattr(Remote, _name, _unary(_name))
for _name in BINARY:
    setattr(Remote, _name, _binary(_name))


def _become(old: Any, new: Any) -> None:
    """Make a list, dict or set of ours what the other side made of its copy."""
    if isinstance(old, list):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001 - the text of an exception is code of the program's too
        return ""
