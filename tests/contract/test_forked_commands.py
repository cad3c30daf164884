"""The commands of a stack under test are forks of one process: they say and end as those do that a shell starts."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from flotilla_testing.command_line import run_command
from flotilla_testing.stack import FLOTILLA, wait_until


@pytest.mark.parametrize(
    "arguments", [["run", "list", "--json"], ["no-such-command"], ["--version"]], ids=" ".join
)
def test_a_fork_says_and_ends_as_the_script_does(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    script = subprocess.run(
        [FLOTILLA, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert run_command(arguments, environment, 60) == (script.returncode, script.stdout, script.stderr)


def test_a_fork_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    never = tmp_path / "stack.yaml"
    os.mkfifo(never)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["ps", "--stack", str(never)], os.environ, 1)
    wait_until("nobody who reads", lambda: not is_read(never))


def is_read(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO
        return False
    return True
