"""Another user of the machine, without a credential, and a stack that runs: it gains nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla_launch.paths import StackPaths
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(200)

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all")
STRANGER = (sys.executable, str(Path(__file__).with_name("stranger.py")))


@pytest.fixture(scope="module")
def stack(fleet: Stack) -> Stack:
    """The fleet, in a folder that everybody can enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    tried = subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", f"import flotilla_core.trust.authority; open({STRANGER[1]!r})"],
        check=False,
        timeout=60,
    )
    if tried.returncode:
        pytest.skip("another user cannot run the interpreter and the code of this checkout")
    return fleet


def services(stack: Stack) -> list[str]:
    return [file.stem for file in (stack.directory / "instances").glob("*.json")]


def processes(stack: Stack) -> list[psutil.Process]:
    """All of the stack: the launcher with all that it started, and the trainer that was started by hand."""
    launcher = psutil.Process(json.loads((stack.directory / "launcher.json").read_text())["pid"])
    mains = [launcher, *(stack.process(name) for name in services(stack))]
    every = {child.pid: child for main in mains for child in (main, *main.children(recursive=True))}
    return list(every.values())


def test_a_stranger_reads_reaches_and_stops_nothing(
    stack: Stack, tmp_path: Path, tiny_run: Callable[[str, int], dict[str, Any]]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_run("watched", 2)))
    stack.run(file)
    ours = processes(stack)
    written = {stack.directory, *stack.directory.rglob("*"), *_open_files(ours)}
    # Where the output of a service that is started by hand goes is its user's choice.
    written -= set(stack.file.parent.glob("*.log"))
    addresses = [stack.address(name) for name in services(stack)]
    paths = sorted(str(path) for path in written if not path.is_socket())
    targets = {
        "paths": paths,
        "pids": [process.pid for process in ours],
        "addresses": addresses,
        "sockets": [str(StackPaths(stack.directory).socket())],
    }
    assert len(paths) > 30 and any(path.endswith(".jsonl.zst") for path in paths)
    # What else listens are the groups of weights: docs/known-limits.md says what they leave open.
    assert _listening(ours) == {"127.0.0.1"}
    done = subprocess.run(
        [*AS_NOBODY, *STRANGER],
        input=json.dumps(targets),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gained"] == []
    refused = found["refused"]
    assert refused["read"] >= len(paths) - 2 and refused["signal"] >= 4 * len(ours) - 4
    assert refused["knock"] == 2 * len(addresses), refused
    assert refused["connect to socket"] == 1 and refused["read process"] > len(ours)
    # Nobody was disturbed.
    assert {process.pid for process in processes(stack)} == {process.pid for process in ours}
    stack.run(file)


def test_what_everybody_can_see_of_a_process_names_no_secret(stack: Stack) -> None:
    files = [stack.directory / "nats" / name for name in ("credentials", "coordinator-credentials")]
    keys = [(stack.directory / name).read_text() for name in ("credential.pem", "authority.pem")]
    lines = [line for text in keys for line in re.findall(r"PRIVATE KEY-----\n(\S{40,})", text)]
    assert len(lines) == len(keys)
    secrets = [*lines, *(file.read_text().strip().partition(":")[2] for file in files)]
    for process in processes(stack):
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{process.pid}/{name}").read_bytes().decode(errors="replace")
            assert not [secret for secret in secrets if secret in content], (process, name)
    for log in (
        *stack.directory.rglob("*.log"),
        stack.directory / "launcher.json",
        stack.directory / "stack.yaml",
    ):
        assert not [secret for secret in secrets if secret in log.read_text(errors="replace")], log


def test_what_a_stack_wrote_is_its_owners_alone(stack: Stack) -> None:
    modes = {path: path.lstat().st_mode & 0o777 for path in (stack.directory, *stack.directory.rglob("*"))}
    assert {
        str(path): oct(mode) for path, mode in modes.items() if mode & 0o077 and not path.is_symlink()
    } == {}
    assert modes[stack.directory] == 0o700 and modes[stack.directory / "ledger.sqlite"] == 0o600


def test_another_user_cannot_command_the_stack_with_the_command_line(stack: Stack) -> None:
    for command in (("run", "list"), ("down",), ("up",)):
        done = subprocess.run(
            [*AS_NOBODY, str(Path(sys.executable).parent / "flotilla"), *command, "--stack", str(stack.file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/",
        )
        assert done.returncode != 0, (command, done.stdout)
        assert "Traceback" not in done.stderr, (command, done.stderr)
    assert stack.answers()


def _open_files(processes: list[psutil.Process]) -> set[Path]:
    """What they hold open for writing, wherever it is: shared memory and temporary files among it."""
    return {
        Path(file.path)
        for process in processes
        for file in process.open_files()
        if file.mode != "r" and Path(file.path).exists() and not file.path.startswith("/dev/null")
    }


def _listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses on which any of them does."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
