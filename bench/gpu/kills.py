"""Kills a generator and then a trainer rank with SIGKILL during a run on a host with GPUs; the run must end whole.

The fleet is the one of loop.py: two ranks and two generators on two GPUs, everything else by default. The run makes
`--steps` steps, every third with a checkpoint. After two steps a generator dies while it decodes, two steps later
a rank. Ends with an error unless the run succeeds and its ledger has no sample that was lost or trained twice.

`python bench/gpu/kills.py --out DIR`; `--work DIR` takes model and compile cache of a loop.py that ran before.
`--small` tries the bench itself on a CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from figures import say
from loop import RUN_LIMIT_S, Work, make_files, run_file, show_gpus

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.fault_victims import Victim, process_of
from flotilla_testing.stack import Stack, running_stack, wait_until

GENERATORS = 2
VICTIM = "generator-0"
ENDED = ("succeeded", "failed", "stopped")


def main() -> int:
    """Up, the run and its two deaths, down."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--work", type=Path, help="the folder `work` of a loop.py that ran before")
    cli.add_argument("--steps", type=int, help="6 by default, and 60 with --small")
    cli.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    asked = cli.parse_args()
    asked.steps = asked.steps or (60 if asked.small else 6)
    asked.out.mkdir(parents=True, exist_ok=True)
    work: Path = asked.work or asked.out / "work"
    show_gpus(0 if asked.small else GENERATORS)
    model = make_files(work, shape="tiny" if asked.small else "0.6b")
    description: dict[str, Any] = {"name": "loop", "model": str(model), "restart_budget": 20}
    if asked.small:
        description |= {"trainer": {"nproc": 2}, "generator": {"replicas": GENERATORS}}
    try:
        started = time.monotonic()
        with running_stack(description, work) as stack:
            say(asked.out, up_s=round(time.monotonic() - started, 1))
            _run(stack, asked, work, started)
    finally:
        for log in (work / "state" / "loop" / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
    return 0


def _run(stack: Stack, asked: argparse.Namespace, work: Path, started: float) -> None:
    sizes = Work(8, 4, 32) if asked.small else Work(16, 8, 128)
    described = run_file("kills", work.absolute(), sizes, asked.steps, staleness=1)
    file = work / "run-kills.yaml"
    file.write_text(yaml.safe_dump(described | {"checkpoint": {"every_steps": 3}}))
    run = stack.ok("run", "start", str(file))

    def steps() -> int:
        return len(stack.metrics(run))

    def after(count: int, what: str) -> None:
        wait_until(what, lambda: steps() >= count or _ended(stack, run), RUN_LIMIT_S)
        assert not _ended(stack, run), f"the run ended before {what}"

    deaths: list[tuple[str, Callable[[], int]]] = [
        (VICTIM, lambda: process_of(stack, Victim.GENERATOR, VICTIM).pid),
        ("trainer rank 1", lambda: process_of(stack, Victim.RANK_1, "").pid),
    ]
    for name, found in deaths:
        after(steps() + 2, f"two steps before {name} dies")
        pid = found()
        say(asked.out, killed=name, pid=pid, steps=steps(), after_s=round(time.monotonic() - started, 1))
        os.kill(pid, signal.SIGKILL)
    wait_until("the end of the run", lambda: _ended(stack, run), RUN_LIMIT_S)
    verdict = check(stack.directory / "ledger.sqlite", run["run_id"])
    lines = stack.metrics(run)
    say(
        asked.out,
        state=stack.state(run),
        steps=len(lines),
        lineage=lines[-1]["lineage"],
        ledger=str(verdict),
        seconds=round(time.monotonic() - started, 1),
    )
    assert stack.state(run) == "succeeded", "see the logs beside the figures"
    assert verdict.passed, verdict
    assert lines[-1]["lineage"] > lines[0]["lineage"], "no rank was lost"


def _ended(stack: Stack, run: dict[str, Any]) -> bool:
    return stack.answers() and stack.state(run) in ENDED


if __name__ == "__main__":
    sys.exit(main())
