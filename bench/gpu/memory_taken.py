"""Another process takes memory of a GPU in mid-run: the update is made again with half the tokens, and the run goes on.

Both ends on each of two GPUs, everything by default but micro-batches of `--tokens`. After three steps a process takes
all but `--leave` GiB of what the first GPU has free, and holds it for `--seconds`. Prints the micro-batches of each
step, the trainer's warnings and how the run ended. `memory_taken.py --work W --out DIR`, with the folder `work` of a
`loop.py` that ran before.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from figures import say
from loop import ENDED, RUN_LIMIT_S, Work, make_files, run_file, show_gpus

from flotilla_testing.stack import Stack, running_stack, wait_until

HOLD = """
import sys, time, torch
leave, seconds = float(sys.argv[1]), float(sys.argv[2])
free = torch.cuda.mem_get_info(0)[0]
held = torch.empty(max(0, int(free - leave * 2**30)), dtype=torch.uint8, device="cuda:0")
print(held.numel() / 2**30, flush=True)
time.sleep(seconds)
"""
STEPS_BEFORE = 3
GPUS = 2


def main() -> int:
    """Up, the run and the process beside it, down."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--work", type=Path, required=True)
    cli.add_argument("--tokens", type=int, default=32_768, help="tokens of a micro-batch")
    cli.add_argument("--steps", type=int, default=9)
    cli.add_argument("--leave", type=float, default=4.0, help="GiB that the process leaves free")
    cli.add_argument("--seconds", type=float, default=30.0)
    asked = cli.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    show_gpus(GPUS)
    model = make_files(asked.work)
    try:
        with running_stack({"name": "loop", "model": str(model)}, asked.work) as stack:
            _run(stack, asked)
    finally:
        for log in (asked.work / "state" / "loop" / "logs").glob("trainer*.log"):
            shutil.copy(log, asked.out / log.name)
    return 0


def _run(stack: Stack, asked: argparse.Namespace) -> None:
    described = run_file("taken", asked.work.absolute(), Work(), asked.steps, staleness=0)
    file = asked.work / "run-taken.yaml"
    file.write_text(yaml.safe_dump(described | {"batching": {"tokens_per_microbatch": asked.tokens}}))
    run = stack.ok("run", "start", str(file))
    wait_until("three steps", lambda: len(stack.metrics(run)) >= STEPS_BEFORE, RUN_LIMIT_S, 0.2)
    command = [sys.executable, "-c", HOLD, str(asked.leave), str(asked.seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taking:
        assert taking.stdout is not None
        held = taking.stdout.readline().strip()
        say(asked.out, held_gib=held, after_steps=len(stack.metrics(run)), at=time.time())
        wait_until("the end of the run", lambda: stack.state(run) in ENDED, RUN_LIMIT_S, 0.5)
        taking.kill()
    for step in stack.metrics(run):
        say(asked.out, step=step["step"], microbatches=step.get("microbatches"), step_s=step["time/step_s"])
    log = stack.directory / "logs" / "trainer.log"
    for line in log.read_text(errors="replace").splitlines():
        if "smaller micro-batches" in line or "ranks were lost" in line:
            say(asked.out, log=line[-400:])
    say(asked.out, state=stack.state(run))
    assert stack.state(run) == "succeeded"


if __name__ == "__main__":
    sys.exit(main())
