"""Another process takes memory of a GPU in mid-run: the update is made again with half the tokens, and the run goes on.

Both ends on each of two GPUs, everything by default, with a model whose generators sleep during updates: so a rank
gives memory back before each rollout and needs it again. After `--after` steps a process takes `--take` GiB of the
first GPU, each as soon as it is free there, and holds them for `--seconds`. Prints the micro-batches of each step, the
trainer's warnings, what each process took, and how the run ended. It fails unless the run succeeds; whether an update
was made again is for the reader of its lines. `memory_taken.py --out DIR`.
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
from loop import ENDED, RUN_LIMIT_S, SHAPES, Work, as_started, make_files, run_file, show_gpus
from process_memory import watched

from flotilla_testing.stack import Stack, running_stack, wait_until

HOLD = """
import sys, time, torch
wanted, seconds = int(sys.argv[1]), float(sys.argv[2])
held = []
while len(held) < wanted:
    if torch.cuda.mem_get_info(0)[0] > 1.5 * 2**30:
        held.append(torch.empty(2**30, dtype=torch.uint8, device="cuda:0"))
    else:
        time.sleep(0.005)
print(len(held), time.time(), flush=True)
time.sleep(seconds)
"""
GPUS = 2
TOLD = ("micro-batch", "out of memory", "ranks were lost", "begins again")


def main() -> int:
    """Up, the run and the process beside it, down."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--work", type=Path, help="the folder `work` of a run before")
    cli.add_argument("--shape", choices=SHAPES, default="8b")
    cli.add_argument("--prompts", type=int, default=32)
    cli.add_argument("--tokens", type=int, default=1024, help="the most tokens of a sample")
    cli.add_argument("--after", type=int, default=2, help="steps before memory is taken")
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--take", type=int, default=24, help="GiB that the process takes")
    cli.add_argument("--seconds", type=float, default=10.0)
    cli.add_argument("--limit", type=float, default=RUN_LIMIT_S)
    asked = cli.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work = asked.work or asked.out / "work"
    show_gpus(GPUS)
    model = make_files(asked.work, shape=asked.shape)
    try:
        with (
            running_stack({"name": "loop", "model": str(model)}, asked.work) as stack,
            watched(asked.out, stack),
        ):
            say(asked.out, **as_started(stack))
            _run(stack, asked)
    finally:
        for log in (asked.work / "state" / "loop" / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
    return 0


def _run(stack: Stack, asked: argparse.Namespace) -> None:
    work = Work(asked.prompts, Work.samples, asked.tokens)
    described = run_file("taken", asked.work.absolute(), work, asked.steps, staleness=0)
    file = asked.work / "run-taken.yaml"
    file.write_text(yaml.safe_dump(described))
    say(asked.out, plan=stack.flotilla("run", "plan", str(file)).out)
    run = stack.ok("run", "start", str(file))
    wait_until("the steps before", lambda: len(stack.metrics(run)) >= asked.after, asked.limit, 0.2)
    command = [sys.executable, "-c", HOLD, str(asked.take), str(asked.seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taking:
        assert taking.stdout is not None
        try:
            held = taking.stdout.readline().split()
            say(asked.out, held_gib=held, after_steps=len(stack.metrics(run)), at=time.time())
            wait_until("the end of the run", lambda: stack.state(run) in ENDED, asked.limit, 0.5)
        finally:
            taking.kill()
    for step in stack.metrics(run):
        say(
            asked.out,
            step=step["step"],
            microbatches=step.get("microbatches"),
            step_s=step["time/step_s"],
            train_s=step.get("time/train_s"),
        )
    log = stack.directory / "logs" / "trainer.log"
    for line in log.read_text(errors="replace").splitlines():
        if any(word in line for word in TOLD):
            say(asked.out, log=line[-600:])
    say(asked.out, state=stack.state(run))
    assert stack.state(run) == "succeeded"


if __name__ == "__main__":
    sys.exit(main())
