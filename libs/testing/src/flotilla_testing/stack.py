"""A real stack under test, driven by the command line as a user drives it.

Invariants: the stack lives in a directory of its own and is down when the context ends, whatever the test did to it;
every wait is bounded and says what it waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from flotilla.common.v1.registration_pb2 import INSTANCE_STATE_READY, ServiceKind
from flotilla.coordinator.v1 import run_pb2
from flotilla_client import SyncClient, connect
from flotilla_core import rpc
from flotilla_core.config import StackConfig, load
from flotilla_core.errors import Unavailable
from flotilla_core.trust import Credential
from flotilla_launch.records import StackRecord
from flotilla_testing.command_line import run_command

FLOTILLA = str(Path(sys.executable).parent / "flotilla")
COMMAND_TIMEOUT_S = 300.0
BOOTED_WITHIN_S = 600.0
"""The real engine boots in half a minute on two idle cores, and in minutes where other suites keep them busy."""

MAKE_MODEL = Path(__file__).resolve().parents[4] / "examples" / "arithmetic" / "make_model.py"

NATS = "nats"
MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The object on stdout."""
        return json.loads(self.out)


class Stack:
    """One stack file and the fleet that runs from it."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.file = file
        self.directory = directory
        self._metrics: dict[Path, GrowingLines] = {}

    def flotilla(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Outcome:
        """Run `flotilla` on this stack."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        return Outcome(*run_command([*arguments, "--stack", str(self.file)], environment, timeout_s))

    def ok(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """Run a command that must succeed; its JSON."""
        outcome = self.flotilla(*arguments, "--json", timeout_s=timeout_s)
        assert outcome.code == 0, f"flotilla {' '.join(arguments)} ended with {outcome.code}:\n{outcome.err}"
        return outcome.json if outcome.out.strip() else None

    def run(self, file: Path, *overrides: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, Any]:
        """Start a run and wait for its end; the finished run."""
        outcome = self.flotilla(
            "run", "start", str(file), *overrides, "--wait", "--json", timeout_s=timeout_s
        )
        assert outcome.out.strip(), f"run start printed nothing (exit {outcome.code}):\n{outcome.err}"
        finished: dict[str, Any] = outcome.json
        assert "state" in finished, f"the run did not start: {finished}"
        return finished

    def client(self) -> SyncClient:
        """Connect a client to the current coordinator; with it repeated queries of a test cost milliseconds."""
        return connect(self.directory.name, self.directory.parent)

    def state(self, run: dict[str, Any]) -> str:
        """Return the state of a run, as `flotilla run show` spells it."""
        with self.client() as client:
            state = client.get_run(run["run_id"]).state
        return run_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()

    def stop_run(self, run: dict[str, Any], limit_s: float) -> None:
        """Stop a run, and wait for its end."""
        self.ok("run", "stop", run["run_id"])
        wait_until("the end of the run", lambda: self.state(run) == "stopped", limit_s)

    def holders(self, kind: ServiceKind.ValueType) -> dict[str, str]:
        """Return the run that has each ready service of a kind; empty where none has it."""
        with self.client() as client:
            services = [(one.registration, one.run_id) for one in client.list_services()]
        return {
            one.name: run for one, run in services if one.kind == kind and one.state == INSTANCE_STATE_READY
        }

    def answers(self) -> bool:
        """Return whether there is a coordinator that takes calls."""
        try:
            with self.client() as client:
                client.list_runs(1)
        except Unavailable:
            return False
        return True

    @property
    def credential(self) -> Credential:
        """The credential of the stack."""
        return Credential.of_stack(load(StackConfig, [self.directory / "stack.yaml"]).bind, self.directory)

    def address(self, name: str) -> str:
        """Return the address of a service of the stack, by its slot's name."""
        announced = json.loads((self.directory / "instances" / f"{name}.json").read_text())
        return str(announced["address"])

    def channel(self, name: str) -> grpc.aio.Channel:
        """Return a channel to a service of the stack, by its slot's name."""
        return rpc.connect(self.address(name), credential=self.credential)

    def process(self, name: str) -> psutil.Process:
        """Return the main process of a service, by its slot's name."""
        announced = json.loads((self.directory / "instances" / f"{name}.json").read_text())
        return psutil.Process(announced["pid"])

    def metrics(self, run: dict[str, Any]) -> list[dict[str, float]]:
        """metrics.jsonl of a run, so far."""
        file = Path(run["directory"]) / "metrics.jsonl"
        return self._metrics.setdefault(file, GrowingLines(file)).read()


class GrowingLines:
    """The whole lines of a file that only grows, each parsed once: tests ask for them again and again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0
        self._lines: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """Return all of them so far."""
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole + end)
            self._lines += map(json.loads, whole.splitlines())
        return [*self._lines]


@contextlib.contextmanager
def running_stack(description: dict[str, Any], directory: Path) -> Iterator[Stack]:
    """Bring a stack up; take it down at the end."""
    file = directory / "stack.yaml"
    file.write_text(yaml.safe_dump({"state_dir": str(directory / "state"), **description}))
    stack = Stack(file, directory / "state" / description["name"])
    try:
        outcome = stack.flotilla("up", timeout_s=BOOTED_WITHIN_S + COMMAND_TIMEOUT_S)
        assert outcome.code == 0, f"the stack did not come up:\n{outcome.err}"
        yield stack
    finally:
        stack.flotilla("down")


@contextlib.contextmanager
def sim_stack(model: Path, directory: Path, **sections: dict[str, Any]) -> Iterator[Stack]:
    """A simulated engine, and everything else real: also the trainer, which learns from made-up samples."""
    description = {
        "name": "sim",
        "model": str(model),
        **sections,
        "generator": {"engine": "sim", **sections.get("generator", {})},
        "restart_budget": 1000,
    }
    with running_stack(description, directory) as stack:
        yield stack


@contextlib.contextmanager
def light_stack(
    model: Path,
    directory: Path,
    *,
    trainer_model: Path | None = None,
    trainer_s: float = 0,
    autoscale: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **generator: Any,
) -> Iterator[Stack]:
    """A whole fleet in seconds: simulated engine, accepting trainer (`trainer_s` an update), everything else real."""
    description = {
        "name": "light",
        "model": str(model),
        "generator": {"engine": "sim", **generator},
        "trainer": {"replicas": 0},
        "environment": environment or {},
        "autoscale": autoscale,
        "restart_budget": 1000,
    }
    with running_stack(description, directory) as stack:
        file = stack.file
        if trainer_model is not None:
            file = directory / "trainer-stack.yaml"
            text = {**yaml.safe_load(stack.file.read_text()), "model": str(trainer_model)}
            file.write_text(yaml.safe_dump(text))
        with accepting_trainer("trainer", file, directory, trainer_s):
            yield stack


@contextlib.contextmanager
def accepting_trainer(name: str, file: Path, logs: Path, update_s: float = 0) -> Iterator[None]:
    """A trainer that accepts every update next to a stack, which it registers with when it is ready."""
    command = [sys.executable, "-m", "flotilla_testing.accepting_trainer", "--name", name]
    with (logs / f"{name}.log").open("wb") as log:
        trainer = subprocess.Popen(
            [*command, "--stack", str(file)],
            stdout=log,
            stderr=log,
            env={**os.environ, "ACCEPTING_TRAINER_S": str(update_s)},
        )
    try:
        yield
    finally:
        trainer.terminate()
        trainer.wait(20)


def wait_until(
    what: str, condition: Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.1
) -> None:
    """Poll until `condition` holds; fail with the name of the wait."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)


def example_model(folder: Path, *, positions: int) -> Path:
    """Make the example model inside `folder`, and return its folder."""
    model = folder / "model"
    subprocess.run([sys.executable, MAKE_MODEL, "--out", model], check=True)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (model / "config.json").write_text(json.dumps(config))
    return model


class StackProcesses:
    """The processes of a stack and the resources that they use, by kind.

    Every service that has announced itself, with its children, and the stack's NATS; several may share a process.
    """

    def __init__(self, state_dir: Path) -> None:
        self._processes: dict[str, set[psutil.Process]] = {}
        for path in sorted((state_dir / "instances").glob("*.json")):
            announced = json.loads(path.read_text())
            process = psutil.Process(announced["pid"])
            self._processes.setdefault(announced["kind"], set()).update(
                {process, *process.children(recursive=True)}
            )
        record = StackRecord.read(state_dir / "processes.json")
        assert record is not None, "the stack runs"
        self._processes[NATS] = {
            psutil.Process(process.identity.pid)
            for process in record.processes
            if process.name == NATS and process.identity is not None
        }

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by kind."""
        return {
            kind: sum(times.user + times.system for times in (one.cpu_times() for one in processes))
            for kind, processes in self._processes.items()
        }

    def resident_mib(self, kind: str) -> float:
        """Memory that the processes of a kind hold now."""
        return sum(one.memory_info().rss for one in self._processes[kind]) / MIB
