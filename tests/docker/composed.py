"""A fleet of deploy/compose under test: Compose starts it as a user does, and Docker tells what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from docker import DockerClient
from docker.errors import APIError
from docker.models.containers import Container
from testcontainers.compose import DockerCompose

from flotilla_testing.stack import wait_until

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose"
PROJECT = "flotilla-test"
USER = os.getuid() or 10001  # as secrets.sh chooses it
CHECK = """
import sys
from pathlib import Path
from flotilla_coordinator.ledger.checker import check
verdict = check(Path(sys.argv[1]), sys.argv[2])
print(verdict)
sys.exit(not (verdict.passed and verdict.lost == verdict.trained_twice == 0))
"""


class Refused(Exception):
    """A command in a container ended with an error; the message says which, and what it printed."""


NO_ANSWER = (APIError, Refused, ValueError)
"""What is raised while a coordinator is gone: its container ends, answers with an error, or is none of one."""


class Composed(DockerCompose):
    """core.yaml by the Compose that this host has: Debian's docker-compose, or Docker's plugin."""

    @cached_property
    def compose_command_property(self) -> list[str]:
        command: list[str] = super().compose_command_property
        return ["docker-compose", *command[2:]] if shutil.which("docker-compose") else command

    def scale(self, service: str, replicas: int) -> None:
        """Add containers of a service, or end some; the others are left as they are."""
        wanted = ["--scale", f"{service}={replicas}", "--no-recreate"]
        self._run_command([*self.compose_command_property, "up", "--detach", *wanted])


@dataclass(frozen=True)
class Fleet:
    """The containers of core.yaml."""

    docker: DockerClient
    compose: Composed

    def containers(self, service: str) -> list[Container]:
        """Return the running containers of a service, the oldest first."""
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        return self.docker.containers.list(filters={"label": labels}, ignore_removed=True)[::-1]

    def in_coordinator(self, *command: str) -> str:
        """Run a command in the coordinator's container; what it prints."""
        (coordinator,) = self.containers("coordinator")
        return told(coordinator, *command)

    def flotilla(self, *arguments: str) -> Any:
        """Run the command line in the coordinator's container; its JSON."""
        found = self.in_coordinator("flotilla", *arguments, "--json")
        return json.loads(found) if found.strip() else None

    def run_state(self, run_id: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.flotilla("run", "show", run_id)
        return shown

    def steps(self, run_id: str) -> int:
        """Return how many steps are done; -1 while no coordinator answers."""
        try:
            return int(self.run_state(run_id)["step"])
        except NO_ANSWER:
            return -1

    def available(self, kind: str) -> list[str]:
        """Return the names of the replicas of a kind that may get work."""
        try:
            listed = self.flotilla("replicas", "list")
        except NO_ANSWER:
            return []
        ready = (one["name"] for one in listed["replicas"] if one["work"] == "ready")
        return [name for name in ready if name.startswith(kind)]

    @contextlib.contextmanager
    def cut_off(self, container: Container) -> Iterator[None]:
        """Take a container out of the network of the fleet, and bring it back."""
        network = self.docker.networks.get(f"{PROJECT}_private")
        network.disconnect(container)
        yield
        network.connect(container)

    def verdict(self, run_id: str) -> str:
        """Return what the checker of the ledger says; raise where anything is lost or trained twice."""
        ledger = "/var/lib/flotilla/compose/ledger.sqlite"
        return self.in_coordinator("python", "-c", CHECK, ledger, run_id).strip()

    def metrics(self, directory: str) -> list[dict[str, float]]:
        """Return metrics.jsonl of a run."""
        lines = self.in_coordinator("cat", f"{directory}/metrics.jsonl").splitlines()
        return [json.loads(line) for line in lines]


def told(container: Container, *command: str) -> str:
    """Run a command in a container; what it prints."""
    code, (out, err) = container.exec_run([*command], demux=True)
    text = (out or b"").decode(errors="replace")
    if code != 0:
        raise Refused(f"{' '.join(command)[:200]} ended with {code}: {text[-3000:]}\n{err!r}")
    return text


def crash(container: Container) -> None:
    """Kill the first process of a container, as a fault would: Docker starts the container again."""
    container.reload()
    psutil.Process(container.attrs["State"]["Pid"]).kill()


def bring(work: Path, tag: str) -> Path:
    """Write what an operator brings beside `examples` of a folder: secrets, a stack file, and settings of Compose."""
    subprocess.run(["sh", COMPOSE / "secrets.sh", work / "secrets"], check=True, capture_output=True)
    shutil.copy(COMPOSE / "stack.yaml", work / "stack.yaml")
    settings = {
        "COMPOSE_PROJECT_NAME": PROJECT,
        "COMPOSE_HTTP_TIMEOUT": 300,
        "FLOTILLA_TAG": tag,
        "FLOTILLA_UID": USER,
        "FLOTILLA_GID": os.getgid() or USER,
        "FLOTILLA_SECRETS": work / "secrets",
        "FLOTILLA_STACK_FILE": work / "stack.yaml",
        "FLOTILLA_MODEL": work / "examples" / "model",
        "FLOTILLA_WORK": work,
    }
    file = work / "settings.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return file


@contextlib.contextmanager
def composed(docker: DockerClient, settings: Path) -> Iterator[Fleet]:
    """Bring core.yaml up; its last words are beside the settings, and its containers and volumes gone, at the end."""
    compose = Composed(COMPOSE, "core.yaml", env_file=str(settings), wait=False)
    with compose:
        try:
            yield Fleet(docker, compose)
        finally:
            settings.with_name("compose.log").write_text("".join(compose.get_logs()))


def wait_for(what: str, condition: Any, timeout_s: float) -> None:
    """Poll as `wait_until` does, at the pace of commands that take a second."""
    wait_until(what, condition, timeout_s, every_s=2.0)
