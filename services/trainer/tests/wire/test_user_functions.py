"""A process that code of the user's forks never works on in place of the front or of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flotilla_core.errors import UserCodeError
from flotilla_trainer.wire.user_functions import guarded

STARTED_AS = os.getpid()
RANK = """
import os, socket
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.wire.frames import Frame

front, rank = socket.socketpair()
link = FrontLink(rank.detach())
child = os.fork()
if child == 0:
    link.answer(Frame("train", 7), {"false": True})
    os._exit(9)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
received = b""
while received.count(b'"beat"') < 3:
    received += front.recv(65536)
os.write(1, f"{status} {b'false' in received}".encode())
os._exit(0)
"""


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_in_an_advantage_ends_where_the_function_returns() -> None:
    child = guarded("advantage", os.fork)
    if os.getpid() != STARTED_AS:
        os._exit(9)  # pragma: no cover - the fault
    assert status_of(child) == 0


def test_a_fork_in_a_loss_answers_nothing() -> None:
    # In a process of its own, for a rank ends its process with its connection.
    done = subprocess.run(
        [sys.executable, "-c", RANK], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.split() == ["0", "False"], done.stderr


def test_an_exception_whose_text_raises_is_an_error_of_the_user() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fails() -> None:
        raise Mute

    with pytest.raises(UserCodeError, match="Mute in code of yours"):
        guarded("advantage", fails)
