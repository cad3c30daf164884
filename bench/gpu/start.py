"""How long one engine takes to start, and what a start that imports vLLM once, or compiles no sampler, would save.

Each way starts twice, in a folder of its own for what is compiled: the second start is the one of every day.

- `ahead`: as the service does it: a server imports vLLM meanwhile, and the engine's process is a fork of it.
- `spawn`: the engine's process imports vLLM after the service has done so.
- `plain-sampler`: `ahead` without the sampler of FlashInfer, which is compiled for top-p and top-k.

Prints a line for each start, and appends its figures to `starts.jsonl`; the log of each start lies beside it and says
when its phases ended. A start that takes too long is ended with all of its processes.

`python bench/gpu/start.py --model FOLDER --out DIR`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from flotilla_core.config.stack import GeneratorConfig
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.vllm import engine as engine_module

WAYS = ("ahead", "spawn", "plain-sampler")


def main() -> int:
    """Start an engine in a process of its own for each way, twice."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", type=Path, required=True)
    cli.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--limit-s", type=float, default=150.0, help="the most seconds that a start may take")
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    asked = cli.parse_args()
    if asked.one:
        asyncio.run(started(asked))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for way in asked.ways:
        for number in (1, 2):
            with (asked.out / f"{way}-{number}.log").open("w") as log:
                code = exit_code([sys.executable, __file__, *sys.argv[1:], "--one", way], log, asked.limit_s)
            failed += code != 0
            last = (asked.out / "starts.jsonl").read_text().splitlines()[-1] if code == 0 else ""
            print(f"{way}, start {number}: {last or f'exit code {code}, see its log'}", flush=True)
    return 1 if failed else 0


def exit_code(command: list[str], log: IO[str], limit_s: float) -> int:
    """Run a command; end its whole group at the limit, because the next start needs the GPU."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def started(asked: argparse.Namespace) -> None:
    """Start one engine, decode a first request, and stop it."""
    if asked.one == "plain-sampler":
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    began = time.perf_counter()
    config = GeneratorConfig(dtype=asked.dtype, max_model_tokens=64, kv_cache_gib=1)
    if asked.one == "spawn":
        engine_module.import_ahead = engine_module.use_forks = lambda: None
        engine_module.look_at_classes = lambda _: None
    cache = asked.out.absolute() / f"cache-{asked.one}"
    engine = engine_module.VllmEngine(config, Checkpoint.read(asked.model), cache=cache)
    await engine.start()
    figures = {"way": asked.one, "ready_s": round(time.perf_counter() - began, 1), **engine.info.versions}
    with (asked.out / "starts.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")
    await engine.stop()


if __name__ == "__main__":
    sys.exit(main())
