"""Rewards that end, stop, change or exhaust their own process, or that return and raise odd things.

As in `hostile_processes`, each function is one kind.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import ctypes
import decimal
import gc
import json
import math
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from hostile_processes import FALSE, LATER, LEFT, ends, frames, leave_behind, write_everywhere

ANY = ("value", "error", "timeout", "false")
"""Who replaces what the worker is made of says what it likes, of its own run alone."""


# Ends, signals and limits.


@ends("error")
def exits(**_: object) -> NoReturn:
    os._exit(0)


@ends("error")
def kills_itself(**_: object) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@ends("error")
def kills_its_group(**_: object) -> float:
    os.killpg(0, signal.SIGKILL)
    return 1.0


@ends("error")
def kills_its_parent(**_: object) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return 1.0


@ends("error")
def kills_its_parent_beside_its_child(**_: object) -> float:
    if os.fork() == 0:
        leave_behind()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return 1.0


@ends("error")
def kills_the_group_of_its_parent(**_: object) -> float:
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
    time.sleep(600)
    return 1.0


@ends("value")
def asks_its_parent_to_end(**_: object) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getppid(), number)
    return 1.0


@ends("timeout")
def stops_its_parent_and_hangs(**_: object) -> float:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)
    return 1.0


@ends("timeout")
def stops_itself(**_: object) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


@ends("error")
def crashes(**_: object) -> float:
    ctypes.string_at(0)
    return 1.0


@ends("error")
def aborts(**_: object) -> float:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@ends("timeout")
def never_ends(**_: object) -> float:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@ends(*LATER)
def alarm_goes_off_between_questions(**_: object) -> float:
    def ring(*_: object) -> None:
        raise RuntimeError("ring")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


@ends("error", "value")
def sets_limits(**_: object) -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return 1.0


@ends("error")
def takes_much_memory(**_: object) -> float:
    resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
    return float(len(bytearray(1 << 40)))


@ends("error")
def recurses(**keywords: object) -> float:
    return float(recurses(**keywords))


@ends("error", "timeout")
def recurses_until_the_stack_is_full(**_: object) -> float:
    sys.setrecursionlimit(1 << 30)
    nested: list[Any] = []
    for _ in range(1_000_000):
        nested = [nested]
    return float(repr(nested))


@ends("error", "value")
def lowers_the_recursion_limit(**_: object) -> float:
    sys.setrecursionlimit(30)
    return 1.0


# The state of the interpreter and of the process.


@ends(*ANY)
def replaces_json(**_: object) -> float:
    json.dumps = lambda *_, **__: '{"value": 100.0}'
    json.loads = lambda *_, **__: {"do": "score"}
    return 1.0


@ends(*ANY)
def replaces_builtins(**_: object) -> float:
    for name in ("isinstance", "len", "float", "str", "getattr", "print", "open", "type"):
        setattr(builtins, name, lambda *_, **__: 100)
    return 1.0


@ends(*ANY)
def replaces_mathematics(**_: object) -> float:
    math.isfinite = lambda _: True
    math.isnan = lambda _: False
    return math.inf


@ends(*ANY)
def empties_modules(**_: object) -> float:
    sys.modules.clear()
    return 1.0


@ends(*ANY)
def replaces_the_worker(**_: object) -> float:
    for name, module in [*sys.modules.items()]:
        if name.startswith(("flotilla_reward", "flotilla_workers")):
            for part in [*vars(module)]:
                setattr(module, part, lambda *_, **__: {"value": 100.0})
    return 1.0


@ends(*ANY)
def replaces_sockets(**_: object) -> float:
    socket.socket.sendall = lambda *_: None
    return 1.0


@ends("value")
def registers_for_the_end(**_: object) -> float:
    atexit.register(write_everywhere, frames() * 3)
    return 1.0


@ends("value")
def threads_go_on(**_: object) -> float:
    def work() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            time.sleep(0.01)

    for _ in range(20):
        threading.Thread(target=work).start()
    return 1.0


@ends("value")
def thread_exits(**_: object) -> float:
    threading.excepthook = lambda _: None
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    return 1.0


@ends(*ANY)
def traces(**_: object) -> float:
    def trace(*_: object) -> None:
        raise RuntimeError("traced")

    sys.setprofile(trace)
    return 1.0


@ends(*ANY)
def hooks(**_: object) -> float:
    def hook(event: str, _: object) -> None:
        if event.startswith("socket"):
            raise RuntimeError(event)

    sys.addaudithook(hook)
    return 1.0


@ends("value")
def changes_folder_and_modes(**_: object) -> float:
    folder = LEFT / "folder" / str(os.getpid())
    folder.mkdir(parents=True)
    os.chdir(folder)
    folder.rmdir()
    os.umask(0o777)
    return 1.0


@ends("value")
def changes_the_environment(**_: object) -> float:
    os.environ.clear()
    os.environ["PYTHONPATH"] = os.environ["PYTHONHOME"] = "/nowhere"
    return 1.0


@ends("value")
def changes_the_path(**_: object) -> float:
    sys.path[:] = ["/nowhere"]
    sys.executable = "/bin/false"
    sys.argv[:] = []
    return 1.0


@ends("value")
def freezes_garbage(**_: object) -> float:
    gc.disable()
    gc.freeze()
    return 1.0


@ends("value")
def changes_arithmetic(**_: object) -> float:
    decimal.getcontext().prec = 1
    random.seed(0)
    time.monotonic = time.time = lambda: 0.0
    return 1.0


@ends("value")
def closes_its_streams(**_: object) -> float:
    sys.stdout = sys.stderr = None
    os.closerange(0, 3)
    return 1.0


@ends("value")
def prints_much(**_: object) -> float:
    for _ in range(64):
        sys.stdout.write("x" * (1 << 16) + "\n")
    return 1.0


@ends(*LATER)
def writes_its_own_file(**_: object) -> float:
    with open(__file__, "a") as file:
        file.write("\n# Another version.\n")
    return 1.0


@ends("value", "error")
def loop_that_stays_open(**_: object) -> float:
    asyncio.set_event_loop(asyncio.new_event_loop())
    return 1.0


# What is returned and raised.


@ends("error")
def raises_half_a_pair(**_: object) -> float:
    raise ValueError("half of a pair: \udcff \ud800")


@ends("error")
def raises_control_characters(**_: object) -> float:
    raise ValueError("\x1b]52;c;aGk=\x07\x1b[2J\x00\r\n\u202e")


@ends("error")
def raises_at_length(**_: object) -> float:
    raise ValueError("x" * (8 << 20))


@ends("error")
def raises_what_cannot_be_told(**_: object) -> float:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    raise Mute


@ends("error")
def raises_an_interrupt(**_: object) -> float:
    raise KeyboardInterrupt


@ends("error")
def raises_the_end_of_a_generator(**_: object) -> float:
    raise GeneratorExit


@ends("error")
def raises_what_is_no_exception(**_: object) -> float:
    class Odd(BaseException):
        """Caught by nobody."""

    raise Odd("odd")


@ends("error")
def raises_with_a_thousand_causes(**_: object) -> float:
    error = ValueError("first")
    for number in range(5_000):
        later = ValueError(str(number))
        later.__cause__ = error
        error = later
    raise error


@ends("error")
def returns_nan(**_: object) -> float:
    return math.nan


@ends("error")
def returns_infinity(**_: object) -> float:
    return -math.inf


@ends("error")
def returns_a_huge_integer(**_: object) -> int:
    return 10**10_000


@ends("error")
def returns_text(**_: object) -> object:
    class Text(str):
        def __float__(self) -> float:
            return FALSE

    return Text("1.0")


@ends("error")
def returns_a_nest(**_: object) -> object:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    return nested


@ends("error")
def returns_what_raises(**_: object) -> object:
    class Number(float):
        def __float__(self) -> float:
            raise RuntimeError("no number")

    return Number(1.0)


@ends("error")
def returns_what_cannot_be_shown(**_: object) -> object:
    class Thing:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    return Thing()


@ends("error", "value")
def returns_what_lies_about_its_class(**_: object) -> object:
    class Liar:
        @property
        def __class__(self) -> type:
            return float

        def __float__(self) -> float:
            return 1.0

    return Liar()
