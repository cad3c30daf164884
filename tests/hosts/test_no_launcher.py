"""A stack that no launcher started: the stack file and the commands of the Helm chart, as processes of this machine.

Each service has a state directory of its own, as in a pod, and finds the others through a NATS server alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accounts import assert_accounted_for

from flotilla_core.bus import NatsServer
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_launch.placement import reserve_port
from flotilla_testing.credentials import credential
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(400)

GOLDEN = Path(__file__).resolve().parents[1] / "helm" / "golden" / "demo.stack.yaml"
WAIT_S = 60.0
STEPS = 30
NO_CANARY = ("weights.canary.prompts=0", "algorithm.correction.fail_at=null")
"""Made-up samples are of no model."""


class Pods:
    """The processes of one release, by the names of their slots."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self._folder = folder
        self._coordinator_port = reserve_port("0.0.0.0")
        self._started: dict[str, ProcessGroup] = {}

    async def start(self, kind: str, name: str) -> None:
        """Start a service with the arguments that the chart gives it; the ports alone are the machine's."""
        is_coordinator = kind == "coordinator"
        arguments = [
            f"--name={name}",
            f"--stack={self.stack.file}",
            f"--advertise-host={'localhost' if is_coordinator else '127.0.0.1'}",
            f"--otlp=https://{'127.0.0.1' if is_coordinator else 'localhost'}:{self._coordinator_port}",
            "--drain-grace=30",
            f"--port={self._coordinator_port if is_coordinator else 0}",
        ]
        if not is_coordinator:
            arguments.append(f"--state-dir={self._folder / name}")
        command = [str(Path(sys.executable).parent / f"flotilla-{kind}"), *arguments]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._started[name] = await ProcessGroup.start(command, stdout=log, stderr=log)

    async def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal a service as a kubelet does, and wait for its end."""
        group = self._started.pop(name)
        os.kill(group.pid, number)
        return await asyncio.wait_for(group.wait(), WAIT_S)

    def replicas(self) -> set[str]:
        """Return the replicas that the coordinator gives work to, as a user asks in its pod."""
        return {each["name"] for each in self.stack.ok("replicas", "list")["replicas"]}

    async def close(self) -> None:
        for group in self._started.values():
            await group.stop(10)


@pytest.fixture
async def pods(arithmetic: Path, tmp_path: Path) -> AsyncIterator[Pods]:
    own = credential(tmp_path)
    nats = await NatsServer.start(tmp_path / "nats", credential=own)
    values: dict[str, Any] = yaml.safe_load(GOLDEN.read_text("utf-8"))
    values["model"] = str(arithmetic / "model")
    values["state_dir"] = str(tmp_path / "state")
    values["bind"]["credential_file"] = str(own.path)
    values["nats"] = {"url": nats.url, "credentials_file": str(tmp_path / "nats" / "credentials")}
    values["generator"] |= {"engine": "sim", "dtype": "float32"}
    values["trainer"] |= {"dtype": "float32"}
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(values))
    stack = Stack(file, tmp_path / "state" / values["name"])
    started = Pods(stack, tmp_path)
    try:
        yield started
    finally:
        await started.close()
        await nats.stop()


async def test_services_of_the_chart_find_each_other_and_run(
    pods: Pods, arithmetic: Path, tmp_path: Path
) -> None:
    stack = pods.stack
    for kind, name in (
        ("trainer", "trainer-0"),
        ("generator", "flotilla-generator-6f7-a"),
        ("reward", "flotilla-reward-5d9-b"),
        ("coordinator", "coordinator"),
    ):
        await pods.start(kind, name)
    wait_until("a coordinator", lambda: stack.directory.exists() and stack.answers(), WAIT_S)
    everything = {"flotilla-generator-6f7-a", "flotilla-reward-5d9-b"}
    wait_until("both replicas", lambda: pods.replicas() == everything, WAIT_S)
    run = small_run(arithmetic, tmp_path / "run.yaml")
    finished = stack.run(run, "steps=3", *NO_CANARY)
    assert finished["state"] == "succeeded", finished

    # Under a run, a pod of the Deployment is replaced by one of another name, and the coordinator's by one of the same.
    await pods.start("generator", "flotilla-generator-6f7-c")
    wait_until("the next one", lambda: "flotilla-generator-6f7-c" in pods.replicas(), WAIT_S)
    longer = stack.ok("run", "start", str(run), f"steps={STEPS}", *NO_CANARY)
    wait_until("the first steps", lambda: len(stack.metrics(longer)) >= 2, WAIT_S)
    assert await pods.end("flotilla-generator-6f7-a") == 0
    assert await pods.end("coordinator") == 0
    done = len(stack.metrics(longer))
    assert done < STEPS, "the run has ended too early to be continued"
    await pods.start("coordinator", "coordinator")
    wait_until("the next coordinator", stack.answers, WAIT_S)
    wait_until("the end of the run", lambda: stack.state(longer) == "succeeded", 2 * WAIT_S)
    assert pods.replicas() == {"flotilla-generator-6f7-c", "flotilla-reward-5d9-b"}
    assert_accounted_for(stack, longer["run_id"])
