"""`bench/staleness.py` in full on a host with two GPUs: a fleet for each staleness, all of them side by side.

Trainers on the first GPU, slowed vLLMs on the second, one warm-up for all. `python bench/gpu/asynchrony.py --out DIR`;
the pace is FLOTILLA_BENCH_PACE_S seconds for the generation of a step and for its update. `--staleness 2 4 --set
algorithm.correction.proximal=trainer` takes two of them and lays a change over the run file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flotilla_testing.stack import Stack, running_stack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import staleness as bench
from table import render


def main() -> int:
    """0 when every staleness kept its bounds."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--staleness", type=int, nargs="+", default=bench.ALL)
    cli.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="over the run file of each")
    cli.add_argument("--weights", type=Path, help="of a warm-up: only the first staleness, in this process")
    asked = cli.parse_args()
    if asked.weights:
        return _one(asked.out, asked.staleness[0], asked.weights, asked.set)
    asked.out.mkdir(parents=True, exist_ok=True)
    bench.make_example(asked.out)
    (asked.out / "warm-up").mkdir()
    with fleet("warm-up", _description(asked.out), asked.out) as stack:
        weights = bench.warmed_up(stack, asked.out)
        for child in [_child(asked.out, staleness, weights, asked.set) for staleness in asked.staleness]:
            child.wait()
    figures = {k: bench.Figures(**json.loads(_file(asked.out, k).read_text())) for k in asked.staleness}
    rows = [row for k, one in figures.items() for row in bench.rows(k, one, figures.get(0))]
    print(render(rows))
    return 1 if any(row.met is False for row in rows) else 0


def _child(out: Path, staleness: int, weights: Path, changes: list[str]) -> subprocess.Popen[bytes]:
    arguments = ["--out", out, "--staleness", str(staleness), "--weights", weights, "--set", *changes]
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    )


def _one(out: Path, staleness: int, weights: Path, changes: list[str]) -> int:
    work = out / f"staleness-{staleness}"
    work.mkdir()
    for name in ("data", "model"):
        (work / name).symlink_to(out / name)
    with fleet(work.name, _description(out), out) as stack:
        figures = bench.learned(stack, work, staleness, weights, *changes)
        _file(out, staleness).write_text(json.dumps(asdict(figures)))
    return 0


def _file(out: Path, staleness: int) -> Path:
    return out / f"staleness-{staleness}.json"


def _description(out: Path) -> dict[str, Any]:
    return {
        "model": str(out / "model"),
        "generator": {**bench.SLOWED_VLLM, "dtype": "float32", "memory_fraction": 0.08},
        "trainer": {"dtype": "float32", "nproc": 1},
        "reward": {"replicas": 1, "workers": 2},
    }


@contextmanager
def fleet(name: str, description: dict[str, Any], out: Path) -> Iterator[Stack]:
    """Boots while no other one of `out` does, works in a folder of its own there; its logs stay."""
    try:
        with ExitStack() as booted:
            with _alone(out):
                stack = booted.enter_context(running_stack({"name": name, **description}, out / name))
            yield stack
    finally:
        for log in (out / name / "state" / name / "logs").glob("*.log"):
            shutil.copy(log, out / f"{name}-{log.name}")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """One fleet boots at a time: an engine measures the memory of its GPU then, and others' would count as its own."""
    with (out / "boot.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
