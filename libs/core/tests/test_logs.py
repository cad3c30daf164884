"""Every log line is JSON, whichever library writes it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from flotilla_core.logs import configure_logs


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    configure_logs("generator-0", stream=stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = before[0], before[1]


def test_our_lines_and_those_of_libraries_have_the_same_keys(out: io.StringIO) -> None:
    structlog.get_logger().info("ours", step=3)
    logging.getLogger("some.library").warning("theirs %d", 4)
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert ours.items() >= {"event": "ours", "level": "info", "service": "generator-0", "step": 3}.items()
    assert theirs.items() >= {"event": "theirs 4", "level": "warning", "logger": "some.library"}.items()
    assert ours["time"].endswith("Z")
    assert theirs["service"] == "generator-0"


def test_an_exception_stays_one_line(out: io.StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("some.library").exception("failed too")
    for line in out.getvalue().splitlines():
        assert "ValueError: no" in json.loads(line)["exception"]


def test_a_service_starts_without_the_console_for_developers() -> None:
    code = "import sys, flotilla_core.service; print('structlog' in sys.modules, 'rich' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True", "False"]
