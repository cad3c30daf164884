"""Where a decode step of the generator's engine goes: phases of the host, Python lines, and kernels of the GPU.

Boots the engine of the generator in this process, without a service around it, on the model that rollout.py makes. For
each number of samples one round is timed as it is. In the next one the phases of each step are timed inside vLLM's
engine process, and its main thread is sampled. A short last round is traced by torch's profiler. Prints one JSON object
for the boot and each number of samples, and appends it to `figures.jsonl`. Lines that vLLM logs while it boots have
their times. `python bench/gpu/decode_step.py --out DIR`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from figures import say
from rollout import LONGEST, RUNNING, SAMPLES, drawn_by, make_model

from flotilla_core.config.generators import GeneratorConfig
from flotilla_generator.checkpoint import Checkpoint

TRACED_TOKENS = 96


async def _measure(asked: argparse.Namespace, started: float) -> None:
    from flotilla_generator.engine.vllm.engine import VllmEngine

    config = GeneratorConfig.model_validate(
        {
            "dtype": asked.dtype,
            "max_model_tokens": LONGEST,
            "max_running_samples": RUNNING,
            "memory_fraction": 0.8,
            "engine_options": json.loads(asked.options),
        }
    )
    cache = (asked.cache or asked.out / "work" / "cache").absolute()
    engine = VllmEngine(config, Checkpoint.read(asked.model), "decode_watch.WatchedWorker", cache)
    await engine.start()
    say(asked.out, what="boot", seconds=round(time.time() - started, 1))
    ask = engine.workers.ask
    try:
        for count in asked.prompts:
            await _seconds(engine, count, 0, asked.tokens)
            figures: dict[str, Any] = {"what": "steps", "samples": count * SAMPLES}
            took = await _seconds(engine, count, 1, asked.tokens)
            figures["seconds"] = round(took, 3)
            figures["tokens_per_s"] = round(count * SAMPLES * asked.tokens / took)
            await ask("watch_start")
            await _seconds(engine, count, 2, asked.tokens)
            figures |= (await ask("watch_stop"))[0]
            if asked.trace:
                await ask("trace_start")
                await _seconds(engine, count, 3, TRACED_TOKENS)
                figures["gpu"] = (await ask("trace_stop"))[0]
                figures["gpu"]["steps"] = TRACED_TOKENS
            say(asked.out, **figures)
    finally:
        await engine.stop()


async def _seconds(engine: Any, count: int, number: int, tokens: int) -> float:
    started = time.perf_counter()
    await drawn_by(engine, count, number, tokens)
    return time.perf_counter() - started


def main() -> int:
    """Boot and measure."""
    started = time.time()
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--prompts", type=int, nargs="*", default=[32, 128])
    cli.add_argument("--tokens", type=int, default=512)
    cli.add_argument("--dtype", default="bfloat16")
    cli.add_argument("--model", type=Path, help="a model to take instead of the random one")
    cli.add_argument("--cache", type=Path, help="what an earlier boot compiled")
    cli.add_argument("--options", default="{}", help="generator.engine_options, as JSON")
    cli.add_argument("--trace", action=argparse.BooleanOptionalAction, default=True)
    asked = cli.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if asked.model is None:
        asked.model = asked.out / "work" / "model"
        if not asked.model.exists():
            asked.model.parent.mkdir(parents=True, exist_ok=True)
            make_model(asked.model.parent)
    asked.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(_measure(asked, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
