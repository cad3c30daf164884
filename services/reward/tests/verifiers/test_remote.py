"""What a program says of its values is read within bounds, and its exceptions arrive as what they are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from flotilla_reward.verifiers.remote import ROOT, Peer
from flotilla_reward.verifiers.verification import plain


def error_of(function: Any) -> BaseException | None:
    """Return what tests see of an exception that a function of a program raises."""
    program, tests = Peer(function), Peer()
    threading.Thread(target=program.serve, daemon=True).start()

    def call() -> None:
        try:
            tests.ask("call", ROOT)
        finally:
            tests._outbox.put({})

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call)
        tests.answer(program.answer(tests._outbox.get(timeout=10)))
        return asked.exception(timeout=10)


def raising(error: BaseException) -> Any:
    def function() -> None:
        raise error

    return function


def test_an_exception_that_is_made_of_more_than_a_text_keeps_its_class_and_its_text() -> None:
    error = error_of(b"\xff".decode)
    assert isinstance(error, UnicodeDecodeError) and "can't decode byte 0xff" in str(error)


def test_only_an_iterator_ends_an_iteration() -> None:
    error = error_of(raising(StopIteration(3)))
    assert isinstance(error, RuntimeError) and not isinstance(error, StopIteration)


def test_an_exception_without_a_class_here_is_no_other_one() -> None:
    assert type(error_of(raising(SystemExit(0)))).__name__ == "SystemExit"
    assert not isinstance(error_of(raising(ExceptionGroup("both", [KeyError()]))), SystemExit)


@pytest.mark.parametrize("value", [Fraction(1, 3), Decimal("1.50"), b"\0\xff", 1 << 70])
def test_a_plain_value_comes_back_as_it_was(value: object) -> None:
    back = plain(Peer().pack(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "said",
    [
        {"Fraction": ["1e5", None]},
        {"Fraction": [1.5, None]},
        {"Fraction": [1]},
        {"Fraction": [{"int": "0x" + "f" * 100_000}, 3]},
        {"Decimal": [0, [1], 5]},
        {"Decimal": 3},
        {"Decimal": "9" * 100_000},
    ],
)
def test_what_no_number_is_packed_as_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        plain(said)
