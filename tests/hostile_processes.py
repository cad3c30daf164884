"""Rewards that harm other processes and the channel of their worker, by mistake or on purpose.

Each function is one kind, and `KINDS` says how its own samples may end. "false" is a number that the function did not
return. What stays behind writes its process id into the folder `left` beside this file.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import pty
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FALSE = 100.0
"""What no sample of an honest kind is ever worth."""
LEFT = Path(__file__).parent / "left"
KINDS: dict[str, frozenset[str]] = {}

Reward = Callable[..., object]


def ends(*outcomes: str) -> Callable[[Reward], Reward]:
    """Say how the samples of a kind may end."""

    def add(kind: Reward) -> Reward:
        KINDS[kind.__name__] = frozenset(outcomes)
        return kind

    return add


LATER = ("value", "error")
"""What goes on after the answer may cost a later sample of the same run."""


def descriptors() -> list[int]:
    """Whatever is open, but for the standard streams."""
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def frames(value: object = FALSE) -> bytes:
    """An answer in each form that a worker might be taken to speak."""
    body = json.dumps({"value": value}).encode()
    return struct.pack(">I", len(body)) + body


def write_everywhere(content: bytes) -> None:
    for descriptor in descriptors():
        try:
            os.write(descriptor, content)
        except OSError:
            pass


def leave_behind() -> None:
    """Say that this process stays, and stay."""
    LEFT.mkdir(exist_ok=True)
    (LEFT / str(os.getpid())).touch()
    time.sleep(600)
    os._exit(0)


def its_secret() -> tuple[int, bytes]:
    """The channel and the secret of the question, as who looks for them in the frames of its callers finds them."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "secret" in frame.f_locals:
            return frame.f_locals["connection"].fileno(), frame.f_locals["secret"]
    raise LookupError("no secret")


# Forks.


@ends("value")
def fork_returns(**_: object) -> float:
    os.fork()
    return 1.0


@ends("value")
def fork_returns_another_number(**_: object) -> float:
    return FALSE if os.fork() == 0 else 1.0


@ends("value")
def forks_many(**_: object) -> float:
    for _ in range(4):
        os.fork()
    return 1.0


@ends("value")
def fork_raises(**_: object) -> float:
    if os.fork() == 0:
        raise ValueError("in the child")
    return 1.0


@ends("value")
def fork_exits_by_sys_exit(**_: object) -> float:
    if os.fork() == 0:
        sys.exit(0)
    return 1.0


@ends("value")
def fork_interrupts(**_: object) -> float:
    if os.fork() == 0:
        raise KeyboardInterrupt
    return 1.0


@ends("error")
def fork_whose_parent_exits(**_: object) -> float:
    if os.fork():
        os._exit(0)
    return 1.0


@ends("value")
def fork_of_libc(**_: object) -> float:
    ctypes.CDLL(None).fork()
    return 1.0


@ends("value")
def fork_of_a_terminal(**_: object) -> float:
    pty.fork()
    return 1.0


@ends("value")
def fork_in_a_thread(**_: object) -> float:
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return 1.0


@ends("value")
def fork_that_replaced_getpid(**_: object) -> float:
    os.getpid, os._exit = (lambda: 1), (lambda _: None)
    os.fork()
    return 1.0


@ends("value")
def multiprocessing_forks(**_: object) -> float:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return max(pool.map(abs, [1.0, 0.5]))


@ends("value")
def fork_writes_frames(**_: object) -> float:
    if os.fork() == 0:
        write_everywhere(frames() * 3)
        leave_behind()
    return 1.0


@ends("value")
def fork_reads_questions(**_: object) -> float:
    if os.fork() == 0:
        for descriptor in descriptors():
            try:
                socket.socket(fileno=os.dup(descriptor)).recv(1 << 16)
            except OSError:
                pass
        write_everywhere(frames())
        leave_behind()
    return 1.0


@ends("value")
def subprocess_with_every_descriptor(**_: object) -> float:
    code = f"import os\nfor fd in range(3, 64):\n try: os.write(fd, {frames() * 3!r})\n except OSError: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], close_fds=False, check=False)
    return 1.0


@ends("value")
def daemon(**_: object) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            leave_behind()
        os._exit(0)
    return 1.0


@ends("value")
def spawned_shell_stays(**_: object) -> float:
    LEFT.mkdir(exist_ok=True)
    script = "trap '' TERM HUP; sleep 600; true"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ, setsid=True)
    (LEFT / str(pid)).touch()
    return 1.0


@ends("error")
def daemons_of_a_worker_that_exits(**_: object) -> float:
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            leave_behind()
    os._exit(3)


# The channel.


@ends("error")
def writes_a_frame(**_: object) -> float:
    write_everywhere(frames())
    return 1.0


@ends("error")
def writes_three_frames(**_: object) -> float:
    write_everywhere(frames() * 3)
    return 1.0


@ends("error")
def writes_frames_with_secrets_of_its_own(**_: object) -> float:
    write_everywhere((bytes(16) + frames()) * 3)
    return 1.0


@ends("error")
def writes_garbage(**_: object) -> float:
    write_everywhere(random.Random(1).randbytes(10_000))
    return 1.0


@ends("error")
def writes_half_a_frame(**_: object) -> float:
    write_everywhere(frames()[:5])
    return 1.0


@ends("error")
def writes_a_frame_of_four_gigabytes(**_: object) -> float:
    write_everywhere(b"\xff" * 20)
    return 1.0


@ends("error")
def writes_nested_frames(**_: object) -> float:
    body = b'{"failed": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    write_everywhere(struct.pack(">I", len(body)) + body)
    return 1.0


@ends("error")
def knows_the_secret_and_nests(**_: object) -> float:
    channel, secret = its_secret()
    body = b'{"failed": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    os.write(channel, secret + struct.pack(">I", len(body)) + body)
    time.sleep(600)
    return 1.0


@ends("error", "false")
def knows_the_secret_and_answers_twice(**_: object) -> float:
    channel, secret = its_secret()
    os.write(channel, (secret + frames()) * 2)
    return 1.0


@ends("error")
def knows_the_secret_and_says_nothing_known(**_: object) -> float:
    channel, secret = its_secret()
    os.write(channel, secret + struct.pack(">I", 12) + b'{"value":[]}')
    time.sleep(600)
    return 1.0


@ends(*LATER)
def thread_writes_later(**_: object) -> float:
    threading.Timer(0.05, write_everywhere, [frames() * 3]).start()
    return 1.0


@ends(*LATER)
def thread_writes_for_ever(**_: object) -> float:
    def write() -> None:
        for _ in range(10_000):
            write_everywhere(frames())
            time.sleep(0.001)

    threading.Thread(target=write, daemon=True).start()
    return 1.0


@ends("error", "value", "timeout")
def thread_reads_questions(**_: object) -> float:
    def read() -> None:
        for descriptor in descriptors():
            try:
                socket.socket(fileno=os.dup(descriptor)).recv(1 << 16)
            except OSError:
                pass

    threading.Thread(target=read, daemon=True).start()
    return 1.0


@ends("error")
def closes_every_descriptor(**_: object) -> float:
    os.closerange(0, 1000)
    return 1.0


@ends("error")
def puts_another_descriptor_over_the_channel(**_: object) -> float:
    for descriptor in descriptors():
        os.dup2(1, descriptor)
    return 1.0


@ends("error")
def puts_a_socket_over_the_channel(**_: object) -> float:
    ours, _theirs = socket.socketpair()
    for descriptor in descriptors():
        if descriptor not in (ours.fileno(), _theirs.fileno()):
            os.dup2(ours.fileno(), descriptor)
    os._exit(0)


@ends("error")
def shuts_the_channel_down(**_: object) -> float:
    for descriptor in descriptors():
        try:
            socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    return 1.0


@ends(*LATER)
def makes_descriptors_non_blocking(**_: object) -> float:
    for descriptor in [0, 1, 2, *descriptors()]:
        try:
            os.set_blocking(descriptor, False)
        except OSError:
            pass
    return 1.0


@ends("error")
def closes_every_socket_that_it_finds(**_: object) -> float:
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket):
            thing.close()
    return 1.0
