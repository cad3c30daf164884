"""A fleet of deploy/compose under test, driven by docker and docker-compose as a user drives them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from flotilla_testing.stack import wait_until

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose"
PROJECT = "flotilla-test"
USER = 10001
ENGINE = os.environ.get("FLOTILLA_DOCKER_ENGINE", "sim")
"""`sim` shows the containers alone; `vllm` takes the engine of the image, which no test run has shown yet."""
CHECK = """
import sys
from pathlib import Path
from flotilla_coordinator.ledger.checker import check
verdict = check(Path(sys.argv[1]), sys.argv[2])
print(verdict)
sys.exit(not (verdict.passed and verdict.lost == verdict.trained_twice == 0))
"""


@dataclass(frozen=True)
class Fleet:
    """The containers of core.yaml."""

    docker: str
    environment: dict[str, str]

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        """Run docker-compose on core.yaml."""
        program = shutil.which("docker-compose")
        assert program is not None, "Debian's docker-compose, or a link to that of Compose v2"
        command = [program, "-p", PROJECT, "-f", str(COMPOSE / "core.yaml"), *arguments]
        return run(command, timeout_s, env={**os.environ, **self.environment})

    def ask(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run docker."""
        return run([self.docker, *arguments], timeout_s)

    def containers(self, service: str) -> list[str]:
        """Return the ids of the running containers of a service, the oldest first."""
        found = self.ask(
            *("ps", "--quiet", "--no-trunc", "--filter", f"label=com.docker.compose.project={PROJECT}"),
            *("--filter", f"label=com.docker.compose.service={service}"),
        )
        return found.split()[::-1]

    def flotilla(self, *arguments: str) -> Any:
        """Run the command line in the coordinator's container; its JSON."""
        (coordinator,) = self.containers("coordinator")
        found = self.ask("exec", coordinator, "flotilla", *arguments, "--json")
        return json.loads(found) if found.strip() else None

    def run_state(self, run_id: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.flotilla("run", "show", run_id)
        return shown

    def steps(self, run_id: str) -> int:
        """Return how many steps are done; -1 while no coordinator answers."""
        try:
            return int(self.run_state(run_id)["step"])
        except (subprocess.CalledProcessError, ValueError):
            return -1

    def available(self, kind: str) -> list[str]:
        """Return the names of the replicas of a kind that may get work."""
        try:
            listed = self.flotilla("replicas", "list")
        except (subprocess.CalledProcessError, ValueError):
            return []
        ready = (one["name"] for one in listed["replicas"] if one["work"] == "ready")
        return [name for name in ready if name.startswith(kind)]

    def crash(self, container: str) -> None:
        """Kill the first process of a container, as a fault would: Docker starts the container again."""
        pid = int(self.ask("inspect", "--format", "{{.State.Pid}}", container))
        psutil.Process(pid).kill()

    def verdict(self, run_id: str) -> str:
        """Return what the checker of the ledger says; raise where anything is lost or trained twice."""
        (coordinator,) = self.containers("coordinator")
        ledger = "/var/lib/flotilla/compose/ledger.sqlite"
        return self.ask("exec", coordinator, "python", "-c", CHECK, ledger, run_id).strip()

    def rewards(self, directory: str) -> tuple[float, float]:
        """Return the mean reward of the first and of the last eight steps of a run."""
        (coordinator,) = self.containers("coordinator")
        lines = self.ask("exec", coordinator, "cat", f"{directory}/metrics.jsonl").splitlines()
        rewards = [line["reward/mean"] for line in map(json.loads, lines)]
        return sum(rewards[:8]) / 8, sum(rewards[-8:]) / 8

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")


def run(command: list[str], timeout_s: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    if done.returncode != 0:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        raise error
    return done.stdout


@contextlib.contextmanager
def composed(docker: str, folder: Path, work: Path, tag: str) -> Iterator[Fleet]:
    """Bring core.yaml up with secrets of its own; all containers and volumes are gone at the end."""
    secrets = folder / "secrets"
    subprocess.run(["sh", COMPOSE / "secrets.sh", secrets], check=True, capture_output=True)
    stack = yaml.safe_load((COMPOSE / "stack.yaml").read_text("utf-8"))
    stack["generator"] |= {"replicas": 2, "engine": ENGINE}
    if ENGINE == "sim":
        stack["generator"]["sim"] = {"seconds_per_token": 0.05}
    file = folder / "stack.yaml"
    file.write_text(yaml.safe_dump(stack))
    file.chmod(0o644)
    environment = {
        "FLOTILLA_TAG": tag,
        "FLOTILLA_UID": str(USER),
        "FLOTILLA_GID": str(USER),
        "FLOTILLA_SECRETS": str(secrets),
        "FLOTILLA_STACK_FILE": str(file),
        "FLOTILLA_MODEL": str(work / "examples" / "model"),
        "FLOTILLA_WORK": str(work),
        "COMPOSE_HTTP_TIMEOUT": "300",
    }
    fleet = Fleet(docker, environment)
    try:
        fleet.compose("up", "-d", timeout_s=600)
        yield fleet
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            (folder / "compose.log").write_text(fleet.logs())
        fleet.compose("down", "--volumes", "--timeout", "10")


def wait_for(what: str, condition: Any, timeout_s: float) -> None:
    """Poll as `wait_until` does, at the pace of commands that take a second."""
    wait_until(what, condition, timeout_s, every_s=2.0)
