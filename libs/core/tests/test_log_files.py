"""Logs are read within a limit of memory whatever is in them, and cut in place without harm to who writes them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flotilla_core import log_files
from flotilla_core.log_files import (
    HEADER,
    LONGEST_LINE_BYTES,
    Follower,
    copy_last,
    former,
    keep_bounded,
    tail,
)

MIB = 1 << 20
HUGE = 200 * MIB
LIMIT_KIB = 100 * 1024
"""What a process may grow by while it reads a line of HUGE bytes."""
READERS = {
    "tail": "log_files.tail(path, 100_000)",
    "follow": "follower = log_files.Follower(path); [follower.more() for _ in range(10)]",
    "copy": "log_files.copy_last(path, path.with_name('copy'), since=None, most_bytes=4 << 20)",
    "lines of JSON": "list(json_text.json_lines(path.open('rb')))",
    "cut": "log_files.keep_bounded([path])",
}
PROGRAM = """
import sys
from pathlib import Path
from flotilla_core import json_text, log_files
from flotilla_testing.peak_memory import most_memory_kib

path = Path(sys.argv[1])
before = most_memory_kib()
{read}
print(most_memory_kib() - before)
"""


@pytest.fixture(scope="module")
def one_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huge") / "reward-0.log"
    with path.open("wb") as file:
        for _ in range(HUGE // MIB):
            file.write(b"x" * MIB)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_log_without_newlines_is_read_within_a_limit_of_memory(one_line: Path, reader: str) -> None:
    program = PROGRAM.format(read=READERS[reader])
    done = subprocess.run(
        [sys.executable, "-c", program, str(one_line)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < LIMIT_KIB


def test_the_end_of_a_line_without_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 3 * MIB + b"the end")
    (line,) = tail(log, 5, most_bytes=MIB)
    assert line.startswith("... x") and line.endswith("the end") and len(line) < LONGEST_LINE_BYTES + 10
    log.write_bytes(b"begin" + b"x" * MIB + b"\nlast\n")
    first, last = tail(log, 5)
    assert first.startswith("begin") and first.endswith("bytes more)") and last == "last"


def test_a_log_is_cut_while_it_is_written_and_loses_lines_in_the_instant_of_the_cut_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 64 << 10)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 56 << 10)
    log = tmp_path / "a.log"
    cut = threading.Event()

    def write() -> None:
        with log.open("ab", buffering=0) as file:
            for number in range(2500):
                file.write(f"line {number:04d} of a process that writes on\n".encode())
                if number == 2000:
                    cut.wait(10)

    writer = threading.Thread(target=write)
    writer.start()
    while not cut.is_set():
        keep_bounded([log])
        if former(log).exists():
            cut.set()
    writer.join(10)
    assert former(log).stat().st_size <= 64 << 10 and log.stat().st_size <= 64 << 10
    lines = [line for line in tail(log, 5000) if not line.startswith(HEADER)]
    numbers = [int(line.split()[1]) for line in lines]
    gaps = [(one, other) for one, other in itertools.pairwise(numbers) if other != one + 1]
    assert len(gaps) <= 1 and numbers[-500:] == list(range(2000, 2500)), gaps
    assert former(log).stat().st_mode & 0o077 == 0


def test_a_reader_that_follows_goes_on_after_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 1000)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 900)
    log = tmp_path / "a.log"
    log.write_text("one\n" * 300 + "half")
    follower = Follower(log)
    assert follower.last(2) == ["one", "one"] and follower.more() == []
    keep_bounded([log])
    with log.open("a") as file:
        file.write("two\nthr")
    header, two = follower.more()
    assert header.startswith(HEADER) and "a.log.1" in header and two == "two"
    assert follower.more() == [] and tail(log, 4) == ["half", header, "two", "thr"]


def test_a_start_from_before_a_cut_counts_all_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 1000)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 900)
    log = tmp_path / "a.log"
    log.write_text("before\n" * 200 + "why it died\n")
    keep_bounded([log])
    assert "why it died" in tail(log, 3, start=1350)
    assert tail(log, 0) == [] and tail(tmp_path / "absent.log", 3) == []


def test_a_copy_begins_with_the_moment_that_is_asked_for(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    log = tmp_path / "a.log"
    log.write_text(
        f'{{"time": "{(now - timedelta(hours=1)).isoformat()}", "event": "old"}}\nof the old one\n'
        f'{{"time": "{now.isoformat()}", "event": "new"}}\nof the new one\n'
    )
    copy_last(log, tmp_path / "copy", since=now - timedelta(seconds=1), most_bytes=MIB)
    text = (tmp_path / "copy").read_text()
    assert "old" not in text and text.endswith("of the new one\n")
