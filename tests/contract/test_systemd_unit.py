"""The unit of the launcher, as systemd reads it. It is skipped where systemd-analyze is not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "deploy/local/flotilla@.service"
ANALYZE = shutil.which("systemd-analyze")
PLACE = "/opt/flotilla/bin"
MOST_EXPOSED = 40
"""In tenths, as systemd counts what a service may still do; a plain unit has 96."""


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with the launcher of this environment, because systemd looks whether there is one."""
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text("utf-8").replace(PLACE, str(Path(sys.executable).parent)))
    return file


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say_against_it(installed: Path) -> None:
    unit = installed.with_name("flotilla@main.service")
    installed.rename(unit)
    done = analyze("verify", "--man=no", "--recursive-errors=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(unit.read_text("utf-8").replace("KillMode", "KilMode"))
    assert "KilMode" in analyze("verify", "--man=no", "--recursive-errors=no", str(unit)).stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_it_may_do_little_beyond_its_work(installed: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(installed))
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_a_killed_launcher_stops_no_run_and_a_full_memory_no_stack() -> None:
    unit = settings()
    assert unit["KillMode"] == ["mixed"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["OOMPolicy"] == ["continue"]
    assert unit["ExecStart"] == [f"{PLACE}/flotilla-launcher --stack /etc/flotilla/%i.yaml"]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, check=False)
