"""A child within bounds answers, or is killed with a reason, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_core.bounded_process import BoundedProcess, Bounds, OutOfBounds
from flotilla_core.errors import Internal, NotFound

FUNCTIONS = """
import os, resource, signal, time
from flotilla_core.errors import NotFound

def work(question):
    kind = question["kind"]
    if kind == "echo": return question["text"]
    if kind == "memory": return len(bytearray(1 << 30))
    if kind == "loop":
        while True: pass
    if kind == "number": return len(str(10 ** 10 ** 9))
    if kind == "answer": return "x" * (2 << 20)
    if kind == "file": open(question["path"], "wb").write(bytes(2 << 20))
    if kind == "signal": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "exit": os._exit(3)
    if kind == "refuse": raise NotFound("a", where="b", why="c", next_step="d")
    if kind == "raise": raise KeyError("k")
    if kind == "print": print("not an answer"); return os.getpid()
    if kind == "core": return resource.getrlimit(resource.RLIMIT_CORE)
"""
BOUNDS = Bounds(memory_bytes=512 << 20, cpu_s=1.0, answer_bytes=1 << 20, file_bytes=1 << 20)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundedProcess]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions_of_test.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with BoundedProcess("functions_of_test:work", BOUNDS) as one:
            yield one


Ask = Callable[[dict[str, Any]], Any]


@pytest.fixture(params=["by a thread", "by an event loop"])
def ask(request: pytest.FixtureRequest, process: BoundedProcess) -> Ask:
    if request.param == "by a thread":
        return process.ask
    return lambda question: asyncio.run(process.ask_beside(question))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("memory", "more than 512 MiB of memory"),
        ("loop", "more than 1 s of a processor"),
        ("number", "more than 1 s of a processor"),
        ("answer", "larger than 1 MiB"),
        ("signal", "ended by SIGSEGV"),
        ("exit", "ended with code 3"),
    ],
)
def test_what_passes_its_bounds_is_told_and_the_next_question_is_answered(
    ask: Ask, kind: str, told: str
) -> None:
    with pytest.raises(OutOfBounds, match=told):
        ask({"kind": kind})
    assert ask({"kind": "echo", "text": "ü\ud800"}) == "ü\ud800"


def test_errors_keep_their_shape(ask: Ask) -> None:
    with pytest.raises(NotFound) as refused:
        ask({"kind": "refuse"})
    error = refused.value
    assert (error.what, error.where, error.why, error.next_step) == ("a", "b", "c", "d")
    with pytest.raises(Internal, match="KeyError"):
        ask({"kind": "raise"})


def test_a_child_writes_no_large_file_and_no_core(process: BoundedProcess, tmp_path: Path) -> None:
    with pytest.raises(Internal, match="File too large"):
        process.ask({"kind": "file", "path": str(tmp_path / "large")})
    assert (tmp_path / "large").stat().st_size <= 1 << 20
    assert process.ask({"kind": "core"}) == [0, 0]


def test_what_a_child_prints_is_no_answer_and_one_child_answers_all(ask: Ask) -> None:
    assert ask({"kind": "print"}) == ask({"kind": "print"})


def test_a_large_text_comes_back_whole(ask: Ask) -> None:
    text = "ä" * 400_000
    assert ask({"kind": "echo", "text": "begin"}) == "begin" and ask({"kind": "echo", "text": text}) == text


def test_a_child_that_was_killed_between_questions_is_replaced(ask: Ask) -> None:
    pid = ask({"kind": "print"})
    os.kill(pid, signal.SIGKILL)
    assert _gone(pid)
    assert ask({"kind": "print"}) != pid


async def test_an_event_loop_and_threads_ask_at_the_same_time_and_each_gets_its_own_answer(
    process: BoundedProcess,
) -> None:
    texts = [f"text {number}" for number in range(60)]
    answers = await asyncio.gather(
        *(
            process.ask_beside({"kind": "echo", "text": text})
            if number % 2
            else asyncio.to_thread(process.ask, {"kind": "echo", "text": text})
            for number, text in enumerate(texts)
        )
    )
    assert answers == texts


async def test_a_question_that_nobody_waits_for_any_more_leaves_nothing_for_the_next_one(
    process: BoundedProcess,
) -> None:
    await process.ask_beside({"kind": "echo", "text": "alive"})
    asked = asyncio.create_task(process.ask_beside({"kind": "echo", "text": "left"}))
    await asyncio.sleep(0)
    asked.cancel()
    assert await process.ask_beside({"kind": "echo", "text": "next"}) == "next"


def test_a_child_that_cannot_be_started_is_told_and_the_next_question_is_answered(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        for _ in range(2):
            with pytest.raises(OutOfBounds, match="cannot be started: No such file"):
                process.ask({"kind": "print"})
    assert process.ask({"kind": "echo", "text": "again"}) == "again"


def test_a_closed_child_is_gone(process: BoundedProcess) -> None:
    pid = process.ask({"kind": "print"})
    process.close()
    assert not psutil.pid_exists(pid)


PARENT = """
import sys, threading, time
from flotilla_core.bounded_process import BoundedProcess, Bounds
process = BoundedProcess("functions_of_test:work", Bounds(512 << 20, 60.0))
thread = threading.Thread(target=lambda: print(process.ask({"kind": "print"}), flush=True))
thread.start(); thread.join()
assert process.ask({"kind": "echo", "text": "the thread is over"})
print("asked", flush=True)
process.ask({"kind": "loop"})
"""


def test_a_child_dies_with_its_parent_and_not_with_the_thread_that_asked(
    process: BoundedProcess, tmp_path: Path
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "asked\n"
    parent.kill()
    parent.wait(10)
    assert _gone(child)


def _gone(pid: int) -> bool:
    """Wait until a process has ended, whether somebody asked for its status or not."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
