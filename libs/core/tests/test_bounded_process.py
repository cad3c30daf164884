"""A child within bounds answers, or is killed with a reason, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
    process: BoundedProcess, kind: str, told: str
) -> None:
    with pytest.raises(OutOfBounds, match=told):
        process.ask({"kind": kind})
    assert process.ask({"kind": "echo", "text": "ü\ud800"}) == "ü\ud800"


def test_errors_keep_their_shape(process: BoundedProcess) -> None:
    with pytest.raises(NotFound) as refused:
        process.ask({"kind": "refuse"})
    error = refused.value
    assert (error.what, error.where, error.why, error.next_step) == ("a", "b", "c", "d")
    with pytest.raises(Internal, match="KeyError"):
        process.ask({"kind": "raise"})


def test_a_child_writes_no_large_file_and_no_core(process: BoundedProcess, tmp_path: Path) -> None:
    with pytest.raises(Internal, match="File too large"):
        process.ask({"kind": "file", "path": str(tmp_path / "large")})
    assert (tmp_path / "large").stat().st_size <= 1 << 20
    assert process.ask({"kind": "core"}) == [0, 0]


def test_what_a_child_prints_is_no_answer_and_one_child_answers_all(process: BoundedProcess) -> None:
    assert process.ask({"kind": "print"}) == process.ask({"kind": "print"})


def test_a_child_that_was_killed_between_questions_is_replaced(process: BoundedProcess) -> None:
    pid = process.ask({"kind": "print"})
    os.kill(pid, signal.SIGKILL)
    assert _gone(pid)
    assert process.ask({"kind": "print"}) != pid


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
