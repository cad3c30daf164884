"""Stacks of services without a model, for tests of the launcher: real processes, real NATS, up in a second.

Invariants: a stack and all of its processes are gone when a test ends, whatever the test did to the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_core.config import StackConfig
from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch import local
from flotilla_launch.child import under_lease
from flotilla_launch.client import LauncherClient
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import Slot
from flotilla_launch.records import StackRecord
from flotilla_launch.service_process import ServiceProcess
from flotilla_launch.state import LauncherFile, find, read_json
from flotilla_testing.credentials import credential


class StackUnderTest:
    """Stacks of tiny services in a temporary directory, with helpers that look from outside."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.state_dir = directory / "state"
        self.executables = directory / "bin"
        self.executables.mkdir()
        for kind in ("generator", "trainer", "reward", "coordinator"):
            script = f"from flotilla_testing import tiny_service\ntiny_service.main({kind!r})\n"
            self._write(f"flotilla-{kind}", script)
        self.launcher_runs("from flotilla_launch.main import main\nmain()\n")

    def _write(self, name: str, script: str) -> None:
        path = self.executables / name
        path.write_text(f"#!{sys.executable}\n{script}")
        path.chmod(0o755)

    def launcher_runs(self, script: str) -> None:
        """Have every launcher that starts from now on run this script."""
        self._write("flotilla-launcher", script)

    def behave(self, **behaviours: str) -> None:
        """Set how services behave, by name with `_` for `-`; for the processes that start from now on."""
        values = {name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()}
        self._monkeypatch.setenv("FLOTILLA_TEST_BEHAVIOUR", json.dumps(values))

    def config(self, name: str = "tiny", **values: object) -> StackConfig:
        defaults = {"model": "/model", "state_dir": str(self.state_dir), "ready_timeout_s": 30.0}
        defaults["reward"] = {"replicas": 0}
        return StackConfig.model_validate({"name": name, **defaults, **values})

    def paths(self, name: str = "tiny") -> StackPaths:
        return StackPaths.of(self.state_dir, name)

    def service(self, command: list[str], log_path: Path | None = None) -> ServiceProcess:
        """Return a reward service that is supervised, without a supervisor."""
        paths = self.paths()
        paths.make()
        return ServiceProcess(
            Slot("reward-0", SERVICE_KIND_REWARD),
            command=command,
            wrapper=under_lease(paths.directory),
            variables={},
            log_path=log_path or paths.log_file("reward-0"),
            announce_file=paths.announce_file("reward-0"),
            ready_timeout_s=15,
            restart_budget=0,
            credential=credential(paths.directory),
            on_change=lambda: None,
        )

    async def up(self, stack: StackConfig) -> local.UpResult:
        return await local.up(stack, executables=self.executables)

    def guardian(self) -> ProcessIdentity | None:
        values = read_json(self.paths().guardian_file)
        return ProcessIdentity(**values) if values is not None else None

    async def next_launcher(self, killed: int) -> LauncherFile:
        """Return the one that the guardian starts in the place of the one that was killed."""

        def found() -> LauncherFile | None:
            file = find(self.paths())
            return file if file is not None and file.pid != killed else None

        await self.wait_for("another launcher", lambda: found() is not None, 10.0)
        file = found()
        assert file is not None, "the next launcher has ended as well"
        return file

    def identities(self, name: str = "tiny") -> dict[str, ProcessIdentity]:
        """Return the processes that the launcher has recorded, by the name of their service."""
        record = StackRecord.read(self.paths(name).processes_file)
        assert record is not None, "the stack has no record"
        return {process.name: process.identity for process in record.processes if process.identity}

    async def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float = 15.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            await asyncio.sleep(0.02)

    def segments(self) -> set[str]:
        """Return the shared memory that services of this test have made and that is still there."""
        logs = "".join(path.read_text() for path in self.state_dir.glob("*/logs/*.log"))
        made = {line.split()[1] for line in logs.splitlines() if line.startswith("segment ")}
        return {name for name in made if (Path("/dev/shm") / name).exists()}

    def processes(self) -> set[int]:
        """Return every process of this test, by what its command line or environment says."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                    if str(self.state_dir).encode() in text and ProcessIdentity.of(int(entry.name)):
                        found.add(int(entry.name))
        return found


async def status_of(launcher: LauncherClient, name: str) -> ProcessStatus:
    """Return what the launcher says of one process."""
    return next(status for status in (await launcher.state()).processes if status.name == name)


async def until(
    launcher: LauncherClient, name: str, condition: Callable[[ProcessStatus], object]
) -> ProcessStatus:
    """Return the status of a process as soon as it meets the condition."""
    seen: list[ProcessStatus] = []
    try:
        async with asyncio.timeout(15):
            while True:
                seen = list((await launcher.state()).processes)
                for status in seen:
                    if status.name == name and condition(status):
                        return status
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{name} did not get there within 15 s: {seen}") from None


@pytest.fixture
async def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StackUnderTest]:
    under_test = StackUnderTest(tmp_path, monkeypatch)
    yield under_test
    for directory in under_test.state_dir.glob("*"):
        file = find(StackPaths(directory))
        await local.down(StackPaths(directory))
        if file is not None and file.identity.alive():
            os.kill(file.pid, signal.SIGKILL)
