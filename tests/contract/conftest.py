"""Two fleets for the tests of this folder: a light one boots in seconds and trains nothing; the other one trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from older_fleet import LAUNCHER_PORT, OlderFleet, older_fleet

from flotilla_testing.runs import QUICK, example_rows, run_on
from flotilla_testing.stack import Stack, light_stack


class SharedFleet:
    """Simulated engine, accepting trainer, real coordinator, rewards, NATS and launcher."""

    def __init__(self, boot: Callable[[], AbstractContextManager[Stack]]) -> None:
        self._boot = boot
        self._until_down = ExitStack()
        self._stack: Stack | None = None

    def running(self) -> Stack:
        """The one that runs; another one after a test has taken it down."""
        if self._stack is None or not self._stack.answers():
            self.close()
            self._stack = self._until_down.enter_context(self._boot())
        return self._stack

    def close(self) -> None:
        self._until_down.close()


def _folder_for_all(parent: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=parent))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def shared_fleet(arithmetic: Path) -> Iterator[SharedFleet]:
    def boot() -> AbstractContextManager[Stack]:
        # A run that goes on leaves time to the commands that look at it.
        sim = {"seconds_per_token": 0.03}
        return light_stack(arithmetic / "model", _folder_for_all(folder), sim=sim)

    # Not below a folder of pytest, which keeps other users out by itself: the stack has to do so.
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder, closing(SharedFleet(boot)) as shared:
        Path(folder).chmod(0o755)
        yield shared


@pytest.fixture(scope="module")
def fleet(shared_fleet: SharedFleet) -> Stack:
    """Its runs are those of all modules; the last test of a module may take it down."""
    return shared_fleet.running()


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OlderFleet]:
    """A fleet whose services are all real but for the engine."""
    described = {"launcher": {"port": LAUNCHER_PORT}, "environment": {"replicas": 1}}
    with older_fleet(tmp_path_factory.mktemp("older"), "26449ff", **described) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def tiny_run(arithmetic: Path) -> Callable[[str, int], dict[str, Any]]:
    """A run of the fewest samples a step, by its name and the number of its steps."""

    def described(name: str, steps: int) -> dict[str, Any]:
        return run_on(example_rows(arithmetic), name, steps, (2, 2, 6), **QUICK)

    return described
