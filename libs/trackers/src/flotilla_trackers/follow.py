"""The trackers of the coordinator's runs: starts the process of each, hears how it goes, and ends it.

Invariants: nothing of a run waits for a tracker. One that fails or hangs is told once, is started again after longer
and longer pauses, and continues where it stopped. At the end of a run its trackers get END_S for what is left; what
they did not take by then is counted, and `flotilla run track` sends it later. A run that continues has one process for
each tracker: the next one starts when the one before has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flotilla_core.config import RunConfig, TrackerConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.log_files import keep_bounded
from flotilla_core.logger import get_logger
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_trackers import SHOWS
from flotilla_trackers.environment import environment_of
from flotilla_trackers.feed import Progress, progress_path

log = get_logger(__name__)

COMMAND = (sys.executable, "-m", "flotilla_trackers.feed")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
END_S = 60.0
CLOSE_S = 5.0
"""The same when the coordinator stops."""

Tell = Callable[[bool, str], None]
"""Takes whether it is a warning, and the text."""


class TrackerProcess:
    """One tracker of one run."""

    def __init__(
        self, run_id: str, directory: Path, run: RunConfig, config: TrackerConfig, name: str
    ) -> None:
        self.name = name
        self.run_id = run_id
        self._directory = directory
        self._order = {
            "type": name,
            "run_id": run_id,
            "name": run.name,
            "directory": str(directory),
            "tracker": config.model_dump(mode="json", exclude_unset=True),
            "config": run.model_dump(mode="json", exclude={"trackers"}),
        }
        self._config = config
        self._outcome = ""
        self._ended = asyncio.Event()
        self._child: ProcessGroup | None = None
        self._told_failure = self._took = False
        self.reason = ""
        """The reason why it took nothing at the last attempt."""

    async def run(self, tell: Tell) -> None:
        """Keep a process going until the run has ended and everything was taken."""
        pause_s = FIRST_PAUSE_S
        while True:
            self._took = False
            try:
                if await self._one_process(tell):
                    return
            except (FlotillaError, OSError) as error:
                self.reason = str(error)
            if self._ended.is_set():
                return
            if self._took:  # it works now and then: it is tried again soon
                pause_s = FIRST_PAUSE_S
            if not self._told_failure:
                self._told_failure = True
                text = f"tracker {self.name} takes nothing, and the run continues: {self.reason}. It is tried again, "
                tell(True, f"{text}and gets all of the run then; its log: {self._log}")
            try:
                async with asyncio.timeout(pause_s):
                    await self._ended.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def end(self, outcome: str) -> None:
        """Let it take what is left, and close the line of the run."""
        self._outcome = outcome
        self._ended.set()
        if self._child is not None:
            self._write({"end": outcome})

    @property
    def progress(self) -> Progress:
        """Return what the tracker has taken."""
        return Progress.read(progress_path(self._directory, self.name))

    def behind(self) -> int:
        """Return how many lines of the run the tracker has not taken."""
        return self.progress.behind(self._directory)

    @property
    def _log(self) -> Path:
        return self._directory / "trackers" / f"{self.name}.log"

    async def _one_process(self, tell: Tell) -> bool:
        """Start a process and hear it to its end; return whether it took everything."""
        environment, secrets = environment_of(self._config, os.environ)
        self._log.parent.mkdir(exist_ok=True)
        keep_bounded([self._log])
        with self._log.open("ab") as log_file:
            child = await ProcessGroup.start(
                COMMAND,
                environment=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
            )
        self._child, finished = child, False
        try:
            self._write({**self._order, "secrets": secrets})
            if self._ended.is_set():
                self._write({"end": self._outcome})
            assert child.process.stdout is not None
            async for line in child.process.stdout:
                finished = self._hear(json.loads(line), tell) or finished
                keep_bounded([self._log])
        except ValueError as error:  # a client has found the way to the output
            self.reason = f"its process told nonsense: {error}"
        finally:
            self._child = None
            code = await child.kill()
        if not finished and code == -signal.SIGALRM:
            self.reason = "it hangs"
        elif not finished and not self.reason:
            self.reason = f"its process ended with code {code}"
        return finished

    def _hear(self, told: dict[str, object], tell: Tell) -> bool:
        """Act on what the process tells; return whether it has taken everything."""
        if "failed" in told:
            self.reason = str(told["failed"])
        elif "link" in told:
            self.reason = ""
            if told["link"] and not self._told_failure:
                tell(False, f"tracker {self.name} {SHOWS}: {told['link']}")
        elif "taken" in told:
            self._took = True
            if self._told_failure:
                self._told_failure = False
                tell(False, f"tracker {self.name} takes the run again")
        return "finished" in told

    def _write(self, line: Mapping[str, object]) -> None:
        assert self._child is not None and self._child.process.stdin is not None
        self._child.process.stdin.write(json.dumps(line).encode() + b"\n")


class Trackers:
    """The trackers of all runs of one coordinator."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str], tuple[TrackerProcess, asyncio.Task[None]]] = {}

    def begin(self, run_id: str, directory: Path, config: RunConfig, tell: Tell) -> None:
        """Follow a run from now on; one that was followed before is continued."""
        for section in config.trackers:
            key = (run_id, section.type)
            before = self._processes.get(key)
            process = TrackerProcess(run_id, directory, config, section, section.type)
            task = asyncio.create_task(
                _after(before, process, tell), name=f"tracker {section.type} of {run_id}"
            )
            self._processes[key] = process, task
            task.add_done_callback(lambda task, key=key: self._forget(key, task))  # type: ignore[misc]

    def end(self, run_id: str, outcome: str) -> None:
        """Let the trackers of a run take what is left, without waiting for them."""
        for process, task in self._of(run_id):
            process.end(outcome)
            asyncio.get_running_loop().call_later(END_S, task.cancel)

    def abandon(self, run_id: str) -> None:
        """End the trackers of a run that another coordinator has now."""
        for _, task in self._of(run_id):
            task.cancel()

    async def close(self) -> None:
        """End all of them within a short time."""
        left = list(self._processes.values())
        tasks = {task for _, task in left}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _of(self, run_id: str) -> Iterable[tuple[TrackerProcess, asyncio.Task[None]]]:
        return [found for key, found in self._processes.items() if key[0] == run_id]

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._processes.get(key, (None, None))[1] is task:
            del self._processes[key]


async def _after(
    before: tuple[TrackerProcess, asyncio.Task[None]] | None, process: TrackerProcess, tell: Tell
) -> None:
    """Follow a run once the process that followed it before has ended, and count what was left out."""
    if before is not None:
        await asyncio.wait({before[1]})
    try:
        await process.run(tell)
    # A defect in here must not end anything but this tracker.
    except Exception:
        log.exception("a tracker ended", run_id=process.run_id, tracker=process.name)
    finally:
        if left := await asyncio.to_thread(process.behind):
            log.warning(
                f"the tracker has not taken {left} lines; send them: flotilla run track {process.run_id}",
                run_id=process.run_id,
                tracker=process.name,
                why=process.reason,
            )
