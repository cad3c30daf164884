"""What rewards cost: verdicts a second, how long one takes, and what a harmful neighbour costs the others.

A real reward service runs as a process of its own, and is asked over gRPC. All of it shares two cores with this client.
Each figure is by the clock, and again by the CPU seconds that a verdict takes of the service and its workers: 2 / those
is the rate of two idle cores, whatever else the machine does now. The client's own time is in no figure by CPU.
`python bench/rewards.py` prints one JSON line for each figure, within 300 s; names after it choose some of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.struct_pb2 import Struct
from table import Row

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_core import rpc
from flotilla_testing.reward_process import RewardProcess, reward_process

CORES = 2
SECONDS = float(os.environ.get("FLOTILLA_BENCH_SECONDS", "6"))
"""The time for which each rate is measured."""
LIMIT_S = 60.0
GSM8K = "FLOTILLA_BENCH_GSM8K"
"""The variable with the path of a file of GSM8K."""
LATENCIES, FEW_LATENCIES = 150, 40
ROUNDS = 15
"""The times that a harmful sample comes and goes while others are scored; the delay is the median of them."""
SLOW = 150.0
"""The rate below which few latencies are measured."""
HONEST_LIMIT_S = 5.0
HOSTILE_LIMIT_S = 2.0
BEGINNING_S = 2.0
"""The time that an outcome may take beside its limit: a process starts, and another one ends."""
PAUSE_S = 0.2
"""The time between two hostile samples: what they do is measured, and not that they are many."""
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
HONEST = """
def reward(prompt, response, answer, info):
    return float(response == answer)
"""
HOSTILE = """
import os, signal, time

def raises(prompt, response, answer, info):
    raise KeyError(response)

def sleeps(prompt, response, answer, info):
    time.sleep(600)

def turns(prompt, response, answer, info):
    while True:
        pass

def nan(prompt, response, answer, info):
    return float("nan")

def text(prompt, response, answer, info):
    return "1.0"

def none(prompt, response, answer, info):
    return None

def killed(prompt, response, answer, info):
    os.kill(os.getpid(), signal.SIGKILL)

def floods(prompt, response, answer, info):
    for _ in range(1 << 10):
        print("x" * (1 << 20))
    return 1.0

def hoards(prompt, response, answer, info):
    return float(len(bytearray(10 << 30)))
"""
EXPECTED = {
    "raises": "error",
    "sleeps": "timeout",
    "turns": "timeout",
    "nan": "error",
    "text": "error",
    "none": "error",
    "killed": "error",
    "floods": "value",
    "hoards": "error",
}
"""How a sample ends; one that prints too much has its value, or a timeout where the log is slow."""


@dataclass(frozen=True)
class Figure:
    """One figure; `met` compares what the clock says, and `met_by_cpu` what CPU seconds do."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    met: bool | None = None
    met_by_cpu: bool | None = None
    by_cpu: float | None = None
    """The rate of two idle cores."""
    cpu_ms: float | None = None
    """Milliseconds of CPU for each verdict, of the service with its workers."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    note: str = ""
    load: float = 0.0
    """Processes that waited for a CPU in the last minute, when the measurement began."""


@dataclass(frozen=True)
class Work:
    """Samples of one kind, and what their rewards are."""

    reward: str
    items: Sequence[tuple[str, str, float]]
    """Responses, answers and right values."""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 10.0
    misread: float = 0.0
    """The share of samples that may have another value: math-verify may take another number for the answer."""

    def request(self, run_id: str, first: int, count: int) -> pb.ScoreRequest:
        spec = pb.RewardSpec(reward=self.reward)
        spec.timeout.FromMilliseconds(round(self.timeout_s * 1000))
        info = Struct()
        info.update(self.info)
        chosen = [self.items[(first + at) % len(self.items)] for at in range(count)]
        items = [
            pb.ScoreItem(sample_id=str(at), response=response, answer=answer, info=info)
            for at, (response, answer, _) in enumerate(chosen)
        ]
        return pb.ScoreRequest(run_id=run_id, items=items, rewards=[spec])

    def check(self, outcomes: Sequence[pb.ScoreOutcome], first: int) -> None:
        other = 0
        for outcome in outcomes:
            expected = self.items[(first + int(outcome.sample_id)) % len(self.items)][2]
            assert outcome.HasField("value"), f"{self.reward}: {outcome}"
            other += outcome.value.components[0].value != expected
        most = self.misread * max(len(outcomes), 1 / (self.misread or 1))
        assert other <= most, f"{self.reward}: {other} of {len(outcomes)} values are wrong"


class Service:
    """The service that is measured."""

    def __init__(self, process: RewardProcess, folder: Path) -> None:
        self.folder = folder
        self.process = process
        self._stub = RewardServiceStub(process.channel)
        self._leader = psutil.Process(process.process.pid)

    async def ask(self, request: pb.ScoreRequest) -> list[pb.ScoreOutcome]:
        stream = rpc.server_stream(self._stub.Score, request, idle_timeout_s=LIMIT_S)
        return [outcome async for response in stream for outcome in response.outcomes]

    def cpu_s(self) -> float:
        """Return the CPU seconds of the service, of what runs below it, and of what ended there."""
        total = 0.0
        for one in (self._leader, *self._leader.children(recursive=True)):
            try:
                total += sum(one.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue  # Its parent has its time.
        return total

    async def rate(
        self, work: Work, *, items: int, callers: int, own_runs: bool = False
    ) -> tuple[float, float]:
        """Return verdicts a second, and CPU seconds of each; with `own_runs` each call is another run's."""
        numbers = itertools.count()
        done = 0

        async def caller() -> None:
            nonlocal done
            while time.monotonic() < ends:
                number = next(numbers)
                run_id = f"run-{number}-{begun}" if own_runs else "run"
                first = number * items
                work.check(await self.ask(work.request(run_id, first, items)), first)
                done += items

        work.check(await self.ask(work.request("run", 0, items)), 0)
        before, begun = self.cpu_s(), time.monotonic()
        ends = begun + SECONDS
        await asyncio.gather(*(caller() for _ in range(callers)))
        took_s = time.monotonic() - begun
        return done / took_s, (self.cpu_s() - before) / done

    async def latencies(
        self, work: Work, count: int, *, own_runs: bool = False, until: asyncio.Event | None = None
    ) -> list[float]:
        """Return the milliseconds that calls with one sample take, one after the other; more of them `until` then."""
        found: list[float] = []
        while len(found) < count or not (until is None or until.is_set()):
            number = len(found)
            run_id = f"alone-{number}" if own_runs else "run"
            begun = time.perf_counter()
            outcomes = await self.ask(work.request(run_id, number, 1))
            found.append(1000 * (time.perf_counter() - begun))
            work.check(outcomes, number)
        return found


@asynccontextmanager
async def service(isolation: dict[str, object]) -> AsyncIterator[Service]:
    """Start a reward service whose functions run in a jail."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        code = folder / "functions"
        code.mkdir()
        (code / "honest.py").write_text(HONEST)
        (code / "hostile.py").write_text(HOSTILE)
        with _printing_into(folder / "log"):
            async with reward_process(folder, workers=CORES, isolation=isolation) as process:
                yield Service(process, code)


@contextmanager
def _printing_into(log: Path) -> Iterator[None]:
    """Have processes that start here print into a file, as under a launcher."""
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, former in zip((1, 2), kept, strict=True):
            os.dup2(former, number)
            os.close(former)


async def cold() -> AsyncIterator[Figure]:
    """A fresh interpreter in a fresh jail for each verdict: a function whose every call is another run's."""
    yield Figure("CPU of an interpreter that does nothing", round(_interpreter_ms(), 1), "ms")
    async with service({}) as one:
        work = Work(f"{one.folder}/honest.py:reward", [("1", "1", 1.0), ("2", "1", 0.0)])
        yield await _rated(
            one, work, "cold jailed verdicts of a function", bar=100.0, items=1, callers=CORES, own_runs=True
        )
        program = Work("code", [(PROGRAM, "", 1.0)], {"tests": [{"input": "1 2\n", "output": "3\n"}]})
        yield await _rated(one, program, "programs with a test (`code`)", items=16, callers=CORES)


def _interpreter_ms() -> float:
    """Return the CPU that an interpreter takes which does nothing: what this machine makes of any fresh one now."""
    runs = 20
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(runs):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs


async def warm() -> AsyncIterator[Figure]:
    """A process for each verdict, forked in the jail from a worker that has loaded the function."""
    async with service({"preload": []}) as one:
        work = Work(f"{one.folder}/honest.py:reward", [("1", "1", 1.0), ("2", "1", 0.0)])
        yield await _rated(one, work, "warm jailed verdicts, forked", bar=400.0, items=64, callers=CORES)
    async with service({}) as one:
        work = Work(f"{one.folder}/honest.py:reward", [("1", "1", 1.0), ("2", "1", 0.0)])
        yield await _rated(one, work, "warm jailed verdicts, one process", items=64, callers=CORES)


async def trivial() -> AsyncIterator[Figure]:
    """Rewards that the service computes itself."""
    async with service({}) as one:
        work = Work("exact", [("1", "1", 1.0), ("2", "1", 0.0)])
        yield await _rated(one, work, "trivial rewards by Score", bar=5000.0, items=512, callers=4, cores=1)


async def mathematics() -> AsyncIterator[Figure]:
    """`math` on answers as GSM8K has them; half of the responses are wrong."""
    made = [
        (f"He has {n} and {n + 3}.\nThat is {n} + {n + 3} = {2 * n + 3}", str(2 * n + 3)) for n in range(500)
    ]
    works = {"made": made}
    if path := os.environ.get(GSM8K):
        works["GSM8K"] = list(_gsm8k(Path(path)))
    else:
        yield Figure("math on GSM8K", 0.0, "1/s", note=f"skipped: {GSM8K} names no file of GSM8K")
    async with service({}) as one:
        for name, pairs in works.items():
            work = Work("math", [*_right_and_wrong(pairs)], misread=0.02)
            yield await _rated(one, work, f"math, {name}", bar=3000.0, items=256, callers=CORES)


def _gsm8k(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        text = re.sub(r"<<.*?>>", "", json.loads(line)["answer"])
        solution, _, answer = text.rpartition("\n#### ")
        yield solution, answer.replace(",", "")


def _right_and_wrong(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, float]]:
    for solution, answer in pairs:
        if not answer.isdigit():
            continue
        yield f"{solution}\n#### {answer}", answer, 1.0
        yield f"{solution}\n#### {int(answer) + 1}", answer, 0.0


async def hostile() -> AsyncIterator[Figure]:
    """Samples of one run that do harm, while another run's are scored in turn."""
    async with service({"memory_gib": 1.0}) as one:
        honest = Work(f"{one.folder}/honest.py:reward", [("1", "1", 1.0)], timeout_s=HONEST_LIMIT_S)
        await one.latencies(honest, LATENCIES)
        for kind, expected in EXPECTED.items():
            yield await _beside(one, honest, kind, expected)


_Ended = tuple[pb.ScoreOutcome, float]
"""What came of a sample, and after how many seconds."""


async def _beside(one: Service, honest: Work, kind: str, expected: str) -> Figure:
    """Return how much later honest samples end beside a hostile one, and check how that one ends.

    The machine is faster in one second than in the next, so each round compares what lies side by side.
    """
    load = os.getloadavg()[0]
    work = Work(f"{one.folder}/hostile.py:{kind}", [("1", "1", 1.0)], timeout_s=HOSTILE_LIMIT_S)
    await one.latencies(honest, 20)
    alone, beside, ratios, ended = list[float](), list[float](), list[float](), list[_Ended]()
    before = await one.latencies(honest, LATENCIES)
    for _ in range(ROUNDS):
        stop, first = asyncio.Event(), asyncio.Event()
        striking = asyncio.create_task(_strike(one, work, stop, first))
        during = await one.latencies(honest, LATENCIES, until=first)
        stop.set()
        ended += await striking
        after = await one.latencies(honest, LATENCIES)
        ratios.append(statistics.median(during) / statistics.median(before + after))
        alone += before
        beside += during
        before = after
    limit_s = HOSTILE_LIMIT_S + BEGINNING_S
    slowest = max(took_s for _, took_s in ended)
    kinds = {outcome.WhichOneof("outcome") for outcome, _ in ended}
    places = {_place(outcome) for outcome, _ in ended}
    delay = 100 * (statistics.median(ratios) - 1)
    right = kinds <= {expected, "timeout"} and slowest <= limit_s and all(places)
    where = ", ".join(sorted(place or "no place" for place in places))
    told = f"{', '.join(sorted(map(str, kinds)))} in at most {slowest:.2f} s, at {where}"
    return Figure(
        f"delay of others beside a reward that {kind}",
        round(delay, 1),
        "%",
        10.0,
        delay <= 10.0 and right,
        p50_ms=round(statistics.median(beside), 2),
        p99_ms=_p99(beside),
        note=f"{told}; alone: median {statistics.median(alone):.2f} ms, p99 {_p99(alone):.2f} ms",
        load=round(load, 1),
    )


async def _strike(one: Service, work: Work, stop: asyncio.Event, first: asyncio.Event) -> list[_Ended]:
    """Score hostile samples, one after the other, until it is enough; at least one, whose end is told."""
    found: list[_Ended] = []
    while not found or not stop.is_set():
        begun = time.monotonic()
        (outcome,) = await one.ask(work.request("hostile", 0, 1))
        found.append((outcome, time.monotonic() - begun))
        first.set()
        await asyncio.sleep(PAUSE_S)
    return found


def _place(outcome: pb.ScoreOutcome) -> str:
    kind = outcome.WhichOneof("outcome")
    if kind == "value":
        return "no failure"
    told = getattr(outcome, str(kind))
    return f"{Path(told.file).name}:{told.line}" if getattr(told, "file", "") else ""


async def _rated(
    one: Service,
    work: Work,
    what: str,
    *,
    bar: float | None = None,
    items: int,
    callers: int,
    own_runs: bool = False,
    cores: int = CORES,
) -> Figure:
    load = os.getloadavg()[0]
    rate, cpu_s = await one.rate(work, items=items, callers=callers, own_runs=own_runs)
    # Of what is slow fewer, so that all of it ends in time.
    found = await one.latencies(work, LATENCIES if rate > SLOW else FEW_LATENCIES, own_runs=own_runs)
    by_cpu = cores / cpu_s
    note = f"{callers} calls of {items} at a time; latencies of calls with one sample, one after the other"
    if cores == 1:
        note += "; by CPU: one core for the service, the other one for its clients"
    return Figure(
        what,
        round(rate, 1),
        "1/s",
        bar,
        None if bar is None else rate >= bar,
        None if bar is None else by_cpu >= bar,
        round(by_cpu, 1),
        round(1000 * cpu_s, 3),
        round(statistics.median(found), 2),
        _p99(found),
        note,
        round(load, 1),
    )


def _p99(values: Sequence[float]) -> float:
    return round(sorted(values)[int(0.99 * (len(values) - 1))], 2)


PARTS: dict[str, Callable[[], AsyncIterator[Figure]]] = {
    "cold": cold,
    "warm": warm,
    "trivial": trivial,
    "math": mathematics,
    "hostile": hostile,
}


async def figures(names: Sequence[str], tell: Callable[[Figure], None]) -> list[Figure]:
    """Measure, and tell each figure as soon as it is there."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    found = []
    for name in names:
        async for figure in PARTS[name]():
            tell(figure)
            found.append(figure)
    return found


def measure() -> list[Row]:
    """Every figure, as rows of the table of `make bench`."""
    rows = []
    for one in asyncio.run(figures([*PARTS], lambda _: None)):
        beside = f" ({one.by_cpu:,.0f}/s by CPU, p99 {one.p99_ms:g} ms)" if one.by_cpu else ""
        bar = "" if one.bar is None else f"{'<=' if one.unit == '%' else '>='} {one.bar:,.0f}"
        rows.append(Row(one.what, f"{one.value:,.1f} {one.unit}{beside}", bar, one.met))
    return rows


def main() -> int:
    lines = os.fdopen(os.dup(1), "w")

    def tell(figure: Figure) -> None:
        print(json.dumps(dataclasses.asdict(figure)), file=lines, flush=True)

    found = asyncio.run(figures(sys.argv[1:] or [*PARTS], tell))
    return 1 if any(one.met is False for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
