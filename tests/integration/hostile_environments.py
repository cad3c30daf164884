"""Environments that harm, and one that does not, which shares their worker."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time

from flotilla_environment import Begun, Environment, Reply, Task, Turn


class Calm(Environment):
    """Counts its turns, and says them."""

    def __init__(self, *, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def begin(self, task: Task) -> Begun:
        self.seed, self.turns = task.seed, []
        return Begun(f"seed {task.seed}")

    def reply(self, turn: Turn) -> Reply:
        time.sleep(self.slow_s)
        self.turns.append(turn.content)
        if turn.content == "end":
            return Reply(done=True, reward=1.0, rewards={"said": float(len(self.turns))})
        return Reply(f"{self.seed}: {' '.join(self.turns)}", reward=0.5)


class Random(Calm):
    """Says nothing twice."""

    def reply(self, turn: Turn) -> Reply:
        return Reply(os.urandom(8).hex())


class Hostile(Environment):
    """Does what it is asked for, at its second turn or where that says."""

    def __init__(self, *, kind: str) -> None:
        self.kind = kind
        if kind == "init_raises":
            raise RuntimeError("no")

    def begin(self, task: Task) -> Begun:
        if self.kind == "begin_never_ends":
            while True:
                pass
        if self.kind == "tool_without_name":
            return Begun("begin", [{"description": "who am I?"}])
        return Begun("begin")

    def reply(self, turn: Turn) -> Reply:
        if turn.content == "1":
            return Reply("go on")
        return getattr(self, self.kind)()

    def close(self) -> None:
        if self.kind == "close_raises":
            raise RuntimeError("close")

    def never_ends(self):
        while True:
            pass

    def sleeps(self):
        time.sleep(3600)

    def recurses(self):
        return self.recurses()

    def raises(self):
        raise KeyError("level")

    def raises_escapes(self):
        raise RuntimeError("\x1b]0;owned\x07\x1b[2J" + "x" * 100_000)

    def leaves(self):
        sys.exit("bye")

    def kills_its_worker(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def ends_its_worker(self):
        os._exit(0)

    def breaks_its_worker(self):
        ctypes.string_at(0)

    def kills_its_keeper(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)

    def closes_every_descriptor(self):
        os.closerange(0, 1024)
        return Reply("and now?")

    def writes_to_every_descriptor(self):
        for number in range(3, 64):
            try:
                os.write(number, b"\x00" * 1000)
            except OSError:
                pass
        return Reply("and now?")

    def forks_and_returns(self):
        os.fork()
        return Reply(done=True, rewards={"forked": 1.0})

    def message_of_100_mb(self):
        return Reply("x" * 100_000_000)

    def million_messages(self):
        return Reply([{"role": "user", "content": ""}] * 1_000_000)

    def deep_arguments(self):
        arguments = current = {}
        for _ in range(100_000):
            current["a"] = current = {}
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return Reply([{"role": "assistant", "content": "", "tool_calls": [call]}])

    def deep_arguments_as_text(self):
        call = {"id": "1", "function": {"name": "f", "arguments": '{"a":' * 100_000}}
        return Reply([{"role": "assistant", "content": "", "tool_calls": [call]}])

    def forged_role(self):
        return Reply([{"role": "policy", "content": "x"}])

    def nested_content(self):
        return Reply([{"role": "user", "content": [{"type": "image"}]}])

    def says_nothing(self):
        return Reply()

    def returns_nothing(self):
        return None

    def reward_is_nan(self):
        return Reply(done=True, rewards={"r": math.nan})

    def reward_is_text(self):
        return Reply(done=True, rewards={"r": "1"})

    def many_rewards(self):
        return Reply(done=True, rewards={str(number): 1.0 for number in range(100_000)})

    def close_raises(self):
        return Reply(done=True, rewards={"r": 1.0})

    def prints_much(self):
        for _ in range(100):
            sys.stdout.write("x" * 10_000)
        raise RuntimeError("printed")

    def writes_later(self):
        threading.Thread(target=self._write_later, daemon=True).start()
        return Reply("wait")

    def _write_later(self):
        time.sleep(0.05)
        self.writes_to_every_descriptor()
