"""Hosts that share no folder, on one machine: each is a mount namespace in which the folders of the others are empty.

So what a service reads was fetched, and what another one keeps of it was fetched from the service that wrote it. Only a
copy of the stack file, of the stack's credential and of the credentials of NATS is brought to a host by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla.common.v1 import registration_pb2
from flotilla_testing.runs import LEARNS, MADE_UP, example_rows, run_on, written
from flotilla_testing.stack import Stack, running_stack, wait_until

READY_S = 120.0
BIN = Path(sys.executable).parent
HELPER = "def points(response):\n    return float(sum(map(ord, response)) % 7)\n"
REWARD = "from helper import points\n\n\ndef reward(prompt, response, answer, info):\n    return points(response)\n"
ADVANTAGE = (
    "def ranked(outcomes):\n"
    "    order = outcomes.totals.argsort().argsort()\n"
    "    return order / max(order.max(), 1) - 0.5\n"
)

HIDE = 'for folder in $HIDDEN; do mount -t tmpfs none "$folder" || exit 99; done; exec "$@"'


def unshare() -> list[str]:
    """Return the command that starts a process in a mount namespace of its own."""
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def can_hide(folder: Path) -> bool:
    command = [*unshare(), "mount", "-t", "tmpfs", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class Hosts:
    """The coordinator's host, with the launcher and NATS, and one host for each other service."""

    def __init__(self, stack: Stack, root: Path, exits: contextlib.ExitStack) -> None:
        self.stack = stack
        self._root = root
        self._exits = exits
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, kind: str, host: str = "", *, port: int = 0, **sections: dict[str, Any]
    ) -> None:
        """Start a service by hand on a host of its own, which is new where it has another name.

        `sections` are those of its own stack file.
        """
        home = self.home(host or name)
        file = self._bring_by_hand(home, sections)
        hidden = [str(one) for one in self._root.iterdir() if one != home and one.is_dir()]
        log = self._exits.enter_context((self._root / f"{host or name}.log").open("ab"))
        process = subprocess.Popen(
            [
                *unshare(), "sh", "-c", HIDE, "sh",
                str(BIN / f"flotilla-{kind}"), "--name", name, "--stack", str(file),
                "--port", str(port),
            ],
            cwd=home,
            stdout=log,
            stderr=log,
            env={**os.environ, "HIDDEN": " ".join(hidden), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._processes[name] = process
        self._exits.callback(self.end, name)

    def wait_ready(self, *names: str) -> None:
        """Wait until the coordinator may use the services."""

        def ready() -> bool:
            for name in names:
                assert self._processes[name].poll() is None, self.log(name)
            with self.stack.client() as client:
                found = {one.registration.name: one.registration.state for one in client.list_services()}
            return all(found.get(name) == registration_pb2.INSTANCE_STATE_READY for name in names)

        wait_until(f"{', '.join(names)} to be ready", ready, READY_S)

    def end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def kill(self, name: str) -> None:
        """End a service as a machine that fails does."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(20)

    def address(self, name: str, host: str = "") -> str:
        """Return the address of a service, as it says itself."""
        return str(self._announced(name, host)["address"])

    def pid(self, name: str) -> int:
        """Return the process id of a service."""
        return int(self._announced(name)["pid"])

    def _announced(self, name: str, host: str = "") -> dict[str, Any]:
        file = self.state(host or name) / "instances" / f"{name}.json"
        announced: dict[str, Any] = json.loads(file.read_text())
        return announced

    def home(self, host: str) -> Path:
        """Return the only folder that a host sees."""
        return self._root / host

    def state(self, name: str) -> Path:
        return self._root / name / "state" / "hosts"

    def log(self, name: str) -> str:
        return (self._root / f"{name}.log").read_text()

    def _bring_by_hand(self, home: Path, sections: dict[str, dict[str, Any]]) -> Path:
        """Copy the stack file, with another model folder than there is, and the credentials of stack and NATS."""
        home.mkdir(exist_ok=True)
        running = json.loads((self.stack.directory / "launcher.json").read_text())
        for name, source in (("credential.pem", "credential.pem"), ("nats", "nats/credentials")):
            shutil.copy(self.stack.directory / source, home / name)
            (home / name).chmod(0o600)
        description: dict[str, Any] = yaml.safe_load(self.stack.file.read_text())
        description |= {
            "state_dir": str(home / "state"),
            "bind": {"credential_file": str(home / "credential.pem")},
            "nats": {"url": running["nats_url"], "credentials_file": str(home / "nats")},
        }
        for section, keys in sections.items():
            description[section] = {**description.get(section, {}), **keys}
        file = home / "stack.yaml"
        file.write_text(yaml.safe_dump(description))
        return file


def run_file(folder: Path, **algorithm: Any) -> Path:
    """Write a run that names files of every kind, all of them beside the coordinator."""
    shutil.copytree(folder / "arithmetic" / "model", folder / "weights")
    for name, text in (("helper.py", HELPER), ("rewards.py", REWARD), ("advantage.py", ADVANTAGE)):
        (folder / name).write_text(text)
    run = run_on(
        example_rows(folder / "arithmetic"),
        "hosts",
        3,
        initial_weights=str(folder / "weights"),
        rewards=[{"reward": f"{folder / 'rewards.py'}:reward"}],
        optimizer=LEARNS,
        algorithm={"advantage": {"type": f"{folder / 'advantage.py'}:ranked"}, **MADE_UP, **algorithm},
        weights={"canary": {"prompts": 0}, "timeout_s": 8.0},
        checkpoint={"every_steps": 1, "keep": 2},
    )
    return written(folder, run)


@contextlib.contextmanager
def separate_hosts(
    arithmetic: Path, tmp_path: Path, names: Sequence[str], **sections: dict[str, Any]
) -> Iterator[Hosts]:
    """Bring up the coordinator's host, and prepare those of these names; skip where nobody may mount."""
    root = tmp_path / "hosts"
    here = root / "coordinator"
    shutil.copytree(arithmetic, here / "arithmetic")
    if not can_hide(here):
        pytest.skip("this system lets nobody mount in a namespace of its own: run as root")
    description = {
        "name": "hosts",
        "model": str(here / "arithmetic" / "model"),
        "generator": {"replicas": 0, "engine": "sim"},
        "reward": {"replicas": 0, "workers": 1},
        **sections,
        "trainer": {"replicas": 0, **sections.get("trainer", {})},
    }
    for name in names:
        (root / name).mkdir()
    with running_stack(description, here) as stack, contextlib.ExitStack() as exits:
        yield Hosts(stack, root, exits)
