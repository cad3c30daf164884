"""A hostile reward in one run, and ten runs of somebody else after it, on one reward service."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import hostile_interpreter
import hostile_processes
from hostile_processes import KINDS

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_testing.reward_process import RewardProcess, reward_process

__all__ = ["KINDS", "Neighbours", "neighbours_in"]

FILES = (hostile_processes, hostile_interpreter)
OTHER_RUNS = 10
WORKERS = 2
LIMIT_S = 20.0
WITH_A_FUNCTION = (1, 4, 8)
RIGHT: list[list[float | None]] = [
    [1.5, 2.5, 1.5, 3.5] if number in WITH_A_FUNCTION else [1.0, 0.0, 1.0, 0.0]
    for number in range(OTHER_RUNS)
]
"""Every reward of the ten runs."""
PROCESS = "import os\n\ndef reward(prompt, response, answer, info):\n    return os.getpid()\n"
GOOD = "def reward(prompt, response, answer, info):\n    return len(response) + 0.5\n"


class Neighbours:
    """One reward service, with a user who harms it and one who does not."""

    def __init__(self, service: RewardProcess, folder: Path) -> None:
        self._service = service
        self.folder = folder
        self._other_runs = 0
        (folder / "good.py").write_text(GOOD)
        for module in FILES:
            shutil.copy(str(module.__file__), folder)

    async def struck(self, kind: str) -> list[pb.ScoreOutcome]:
        """Return the outcomes of a run with a hostile reward."""
        file = next(file for file in FILES if hasattr(file, kind)).__name__
        # Who may hang is waited for in vain; nobody else fails because the machine is busy.
        limit_s = 1.5 if "timeout" in KINDS[kind] else LIMIT_S
        return await self._service.outcomes(
            f"{self.folder}/{file}.py:{kind}", ["x"] * 3, run_id=f"hostile-{kind}", timeout_s=limit_s
        )

    async def assert_felt_by_no_other_run(self, kind: str) -> None:
        """Run a hostile reward, and then ten runs of another user."""
        outcomes = await self.struck(kind)
        assert {ending_of(outcome) for outcome in outcomes} <= KINDS[kind], outcomes
        assert await self.others() == RIGHT

    async def others(self) -> list[list[float | None]]:
        """Return every reward of ten runs, three with a function and seven with a built-in reward."""

        async def run(number: int) -> list[float | None]:
            reward = f"{self.folder}/good.py:reward" if number % OTHER_RUNS in WITH_A_FUNCTION else "math"
            outcomes = await self._service.outcomes(
                reward, ["1", "22", "1", "333"], run_id=f"other-{number}", timeout_s=LIMIT_S
            )
            return [one.value.components[0].value if one.HasField("value") else None for one in outcomes]

        first = self._other_runs
        self._other_runs += OTHER_RUNS
        return await asyncio.gather(*(run(first + number) for number in range(OTHER_RUNS)))

    async def processes_of(self, run_id: str, name: str) -> list[float]:
        """Return the process ids of the workers that scored for a run by a file of this name."""
        file = self.folder / f"{name}.py"
        if not file.exists():
            file.write_text(PROCESS)
        outcomes = await self._service.outcomes(f"{file}:reward", ["x"] * 4, run_id=run_id)
        return [outcome.value.components[0].value for outcome in outcomes]

    def left(self) -> list[int]:
        """Return the processes that rewards left behind and that still run."""
        pids = [int(name.name) for name in (self.folder / "left").glob("[0-9]*")]
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def ending_of(outcome: pb.ScoreOutcome) -> str:
    """Return how a sample ended; "false" is a number that the hostile function did not return."""
    kind = str(outcome.WhichOneof("outcome"))
    return "false" if kind == "value" and outcome.value.components[0].value != 1.0 else kind


@asynccontextmanager
async def neighbours_in(folder: Path) -> AsyncIterator[Neighbours]:
    """Start a reward service; when it has ended, so has everything that rewards left behind."""
    async with reward_process(folder, workers=WORKERS) as service:
        neighbours = Neighbours(service, folder)
        yield neighbours
    assert neighbours.left() == []
