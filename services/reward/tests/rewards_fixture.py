"""Reward functions of a user: good ones and every kind of bad one."""

from __future__ import annotations

import os
import signal
import time

from rewards_fixture_helper import half


def length(prompt: str, response: str, answer: str, info: dict, *, scale: float = 1.0) -> float:
    return len(response) * scale


def beside(prompt: str, response: str, answer: str, info: dict) -> float:
    return half()


def from_info(prompt: str, response: str, answer: str, info: dict) -> float:
    return info["points"][0] + len(prompt)


def prints(prompt: str, response: str, answer: str, info: dict) -> bool:
    print("user code prints what it likes", flush=True)  # noqa: T201 - users do
    return True


def raises(prompt: str, response: str, answer: str, info: dict) -> float:
    raise RuntimeError("the judge is at lunch")


def exits(prompt: str, response: str, answer: str, info: dict) -> float:
    raise SystemExit(3)


def not_a_number(prompt: str, response: str, answer: str, info: dict) -> float:
    return float(response)


def nothing(prompt: str, response: str, answer: str, info: dict) -> None:
    return None


def hangs(prompt: str, response: str, answer: str, info: dict) -> float:
    while response == "hang":
        time.sleep(0.01)
    return 1.0


def dies(prompt: str, response: str, answer: str, info: dict) -> float:
    if response == "exit":
        os._exit(7)
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def process_id(prompt: str, response: str, answer: str, info: dict) -> float:
    return os.getpid()


NO_FUNCTION = 3


def slow(prompt: str, response: str, answer: str, info: dict) -> float:
    time.sleep(0.1)
    return 1.0
