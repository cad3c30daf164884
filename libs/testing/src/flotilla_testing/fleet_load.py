"""A fleet of any size under load, as in production but for the two models: nothing decodes and nothing trains.

Generators simulate the time that decoding takes, so that many calls are open at once; several share a process. The
trainer accepts. Everything else is real and on: interceptors, spans, reward calls, weight syncs, the durable ledger.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_testing.runs import endless_run
from flotilla_testing.stack import Stack, StackProcesses, example_model, light_stack, wait_until

START_LIMIT_S = 600.0
WARM_UP_LIMIT_S = 1200.0
LOOK_EVERY_S = 1.0
LOOKS_A_COUNT = 5
"""Open calls are counted at every so many looks: to ask costs the coordinator some milliseconds."""
LONGEST_PROMPT = 6
"""Tokens, one a character: `99+99=`."""
LOOP_S = 0.06
"""CPU seconds of a fixed loop beside nothing else, on two cores of 2026 that are real ones."""
STANDS_BACK = 10
"""Niceness of the generators: in production they are on other machines and take no turns from the coordinator."""


@dataclass(frozen=True)
class FleetLoad:
    """The load that a fleet has to carry."""

    replicas: int = 64
    """Generators."""
    processes: int = 8
    """Processes that they share."""
    calls: int = 3072
    """Group calls that the run admits at once, by its staleness; from an update to the next step those of one step
    fewer. Some of them are always being scored or trained."""
    calls_per_step: int = 256
    samples: int = 8
    """Samples of a group."""
    longest_response: int = 512
    """The most tokens of a response; lengths are drawn evenly up to it."""
    shortest_s: float = 12.0
    longest_s: float = 16.0
    """Limits of the time that decoding takes, by length: no fleet can end more than `calls * samples` in this time."""
    update_s: float = 1.0
    """The time that an update takes, and a snapshot. Without it steps follow each other as fast as they can, and what
    is admitted together at the start ends together for ever, with nothing in between."""
    warm_up_steps: int = 24
    """The steps until what was admitted together at the start is gone: twice as many as are admitted at once."""
    seconds: float = 60.0
    """The time that is measured."""

    @property
    def sim(self) -> dict[str, float]:
        """The latency settings of the stack's simulated engine."""
        return {
            "time_to_first_token_s": self.shortest_s,
            "seconds_per_token": (self.longest_s - self.shortest_s) / self.longest_response,
        }

    def calls_that_owe(self, tokens: int) -> int:
        """The coordinator counts a call, while it is open, as its prompt and the longest responses: never too many."""
        return tokens // (self.samples * self.longest_response + LONGEST_PROMPT)

    def run_file(self, stack: Stack) -> Path:
        """Write the file of a run that asks for this load."""
        return endless_run(
            stack,
            prompts=self.calls_per_step,
            samples=self.samples,
            max_staleness=self.calls // self.calls_per_step - 1,
            longest_response=self.longest_response,
        )


@dataclass(frozen=True)
class LoadFigures:
    """The measured cost, from the end of the warm-up on."""

    rate: float
    """Samples a second."""
    open_calls: float
    """Group calls that generators worked on, by the coordinator's count: the mean of what was seen every few seconds.
    Each is a stream that is open until the last of its samples has ended."""
    fewest_open_calls: int
    """The fewest open calls that were seen."""
    coordinator_mib: float
    """The most memory that the coordinator held."""
    lag_p99_s: float
    """The delay of a turn of the coordinator's event loop: the median over the steps of their 99th percentiles. It is
    asked for fifty turns a second: in a step of up to two seconds that percentile is the latest turn."""
    lag_p99_worst_s: float
    """The same of the step where it was highest."""
    longest_lag_s: float
    """The latest turn of all steps."""
    issued_again: int
    """Samples that did not come back from the generator that they were first given to."""
    cpu_seconds: dict[str, float]
    """CPU seconds per 1,000 samples, by kind of process."""
    slower: float
    """How many times `LOOP_S` a fixed loop took meanwhile: more than once where two busy processors are one core."""

    @property
    def all_cpu_seconds(self) -> float:
        """The sum over all processes."""
        return sum(self.cpu_seconds.values())


def measure(load: FleetLoad, directory: Path) -> LoadFigures:
    """Boot such a fleet in `directory`, let a run use it, and take it down."""
    model = example_model(directory, positions=2 * load.longest_response)
    room: dict[str, Any] = {"max_running_samples": load.calls * load.samples}
    parts = light_stack(model, directory, trainer_s=load.update_s, replicas=0, sim=load.sim, **room)
    with parts as stack, crowds(stack, load.replicas, load.processes):
        run = stack.ok("run", "start", str(load.run_file(stack)))
        wait_until("the warm-up steps", lambda: len(stack.metrics(run)) > load.warm_up_steps, WARM_UP_LIMIT_S)
        figures = _measured(stack, run, load)
        stack.ok("run", "stop", run["run_id"])
    return figures


@contextlib.contextmanager
def crowds(stack: Stack, replicas: int, processes: int) -> Iterator[None]:
    """So many generators in so many processes, ready for work."""
    each = -(-replicas // processes)
    begun = []
    with contextlib.ExitStack() as files:
        for first in range(0, replicas, each):
            slots = ["--first", str(first), "--count", str(min(each, replicas - first))]
            log = files.enter_context((stack.file.parent / f"generators-{first}.log").open("wb"))
            command = [
                *(sys.executable, "-m", "flotilla_testing.crowd", "generator"),
                *("flotilla_generator.service:GeneratorHostService", *slots, "--stack", str(stack.file)),
                *("--nice", str(STANDS_BACK)),
            ]
            begun.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            wait_until("the generators", lambda: _ready(stack, begun) == replicas, START_LIMIT_S, 2.0)
            yield
        finally:
            for crowd in begun:
                crowd.terminate()
            for crowd in begun:
                crowd.wait(60)


def _ready(stack: Stack, begun: list[subprocess.Popen[bytes]]) -> int:
    ended = [crowd.args for crowd in begun if crowd.poll() is not None]
    assert not ended, f"see generators-*.log beside {stack.file}: {ended}"
    return sum(one["kind"] == "generator" and one["work"] == "ready" for one in _replicas(stack))


def _replicas(stack: Stack) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = stack.ok("replicas", "list")["replicas"]
    return replicas


def _measured(stack: Stack, run: dict[str, Any], load: FleetLoad) -> LoadFigures:
    processes = StackProcesses(stack.directory)
    first = len(stack.metrics(run))
    before = processes.cpu_seconds()
    resident, open_calls, loops_s = _watched(stack, processes, load)
    after = processes.cpu_seconds()
    steps = stack.metrics(run)[first - 1 :]
    samples = load.calls_per_step * load.samples * (len(steps) - 1)
    assert samples, f"no step ended within {load.seconds:g} s: measure for longer"
    lag_p99_s = [step["coordinator/loop_lag_p99_s"] for step in steps[1:]]
    return LoadFigures(
        rate=samples / (steps[-1]["time"] - steps[0]["time"]),
        open_calls=statistics.mean(open_calls),
        fewest_open_calls=min(open_calls),
        coordinator_mib=max(resident),
        lag_p99_s=statistics.median(lag_p99_s),
        lag_p99_worst_s=max(lag_p99_s),
        longest_lag_s=max(step["coordinator/loop_lag_max_s"] for step in steps[1:]),
        issued_again=int(sum(step["samples/retried"] for step in steps[1:])),
        cpu_seconds={kind: 1000 * (after[kind] - before[kind]) / samples for kind in after},
        slower=statistics.median(loops_s) / LOOP_S,
    )


def _watched(
    stack: Stack, processes: StackProcesses, load: FleetLoad
) -> tuple[list[float], list[int], list[float]]:
    """The coordinator's memory, the open calls and the time of the loop, again and again until the time is over."""
    ends = time.monotonic() + load.seconds
    resident: list[float] = []
    open_calls: list[int] = []
    loops_s: list[float] = []
    with stack.client() as client:
        while time.monotonic() < ends:
            if len(resident) % LOOKS_A_COUNT == 0:
                owed = sum(service.outstanding_tokens for service in client.list_services())
                open_calls.append(load.calls_that_owe(owed))
            resident.append(processes.resident_mib("coordinator"))
            loops_s.append(loop_s())
            time.sleep(LOOK_EVERY_S)
    return resident, open_calls, loops_s


def loop_s() -> float:
    """CPU seconds of a fixed loop now."""
    began = time.process_time()
    counts: dict[str, int] = {}
    for number in range(300_000):
        word = str(number % 1024)
        counts[word] = counts.get(word, 0) + number
    return time.process_time() - began
