"""Tokens a second of a generator with matrices of 8 bits against bfloat16, and how far apart their probabilities are.

Writes a model of random weights, drawn on the device, with a head scaled until sampled tokens are likely. Two engines
decode the same prompts: with two GPUs at the same time, else one after the other. Then the bfloat16 engine says how
likely it finds the tokens that each of them drew. Prints one JSON object for each engine and one for the comparison,
and appends it to `figures.jsonl`. Ends with an error where the ratio is below `--least`.
`python bench/gpu/fp8.py --out DIR`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from figures import say
from qwen3_shape import QWEN3_8B, SMALL
from rollout import LONGEST, SAMPLES, drawn_by

from flotilla_core.config.generators import GeneratorConfig
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import Sample

SHAPES: dict[str, dict[str, Any]] = {"8b": QWEN3_8B, "small": SMALL}
KINDS = ("fp8", "bf16")
PROMPTS = 32
SHARD_BYTES = 2 << 30
HEAD_SCALE = 4.5
"""Logits of random weights are normal; so wide, a few of 152,000 tokens share most of the probability."""
SCORED = 48
"""Samples of each engine that are scored."""


def main() -> int:
    """The model, both engines, the comparison."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--shape", choices=SHAPES, default="8b")
    cli.add_argument("--tokens", type=int, default=512)
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--least", type=float, default=1.2)
    cli.add_argument("--limit-s", type=float, default=400.0)
    cli.add_argument("--kind", choices=KINDS, help="only this engine, on the model of --out")
    cli.add_argument("--model", type=Path, help="a model to take instead of the random one")
    cli.add_argument(
        "--kinds", nargs=2, default=KINDS, help="what the two engines are; only for tries without a GPU"
    )
    asked = cli.parse_args()
    if asked.kind is not None:
        asyncio.run(_engine(asked))
        return 0
    import torch

    work: Path = asked.out / "work"
    work.mkdir(parents=True)
    started = time.monotonic()
    if asked.model is not None:
        shutil.copytree(asked.model, work / "model")
    else:
        _write_model(work / "model", SHAPES[asked.shape])
    say(asked.out, what="model", seconds=round(time.monotonic() - started, 1))
    gpus = torch.cuda.device_count()
    running = []
    for number, kind in enumerate(KINDS):
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(number)} if gpus > 1 else {})
        command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
        with (asked.out / f"{kind}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        if gpus <= 1:
            running[-1].wait(asked.limit_s)
    for process in running:
        process.wait(max(1.0, asked.limit_s - (time.monotonic() - started)))
    return _compared(asked)


def _write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a Qwen3 of random weights, a shard at a time, without a copy of all of it in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir()
    config = Qwen3Config(**{"max_position_embeddings": 40_960, "tie_word_embeddings": False} | shape)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(config).state_dict().items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)
    shard: dict[str, Any] = {}
    number = 0
    for name, size in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if len(size) == 1:
            tensor = torch.ones(size)
        else:
            tensor = torch.randn(size, generator=random, device=device) * 0.02
            tensor *= HEAD_SCALE if name == "lm_head.weight" else 1
        shard[name] = tensor.bfloat16().cpu()
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            save_file(shard, folder / f"model-{number}.safetensors")
            shard, number = {}, number + 1
    save_file(shard, folder / f"model-{number}.safetensors")


async def _engine(asked: argparse.Namespace) -> None:
    from flotilla_generator.engine.vllm.engine import VllmEngine

    started = time.monotonic()
    kind = dict(zip(KINDS, asked.kinds, strict=True))[asked.kind]
    config = GeneratorConfig.model_validate(
        {
            "dtype": "float32" if kind == "float32" else "bfloat16",
            "quantization": "fp8" if kind == "fp8" else None,
            "max_model_tokens": LONGEST,
            "max_running_samples": PROMPTS * SAMPLES,
            "memory_fraction": 0.8,
        }
    )
    work: Path = asked.out / "work"
    engine = VllmEngine(
        config, Checkpoint.read(work / "model"), cache=(work / f"cache-{asked.kind}").absolute()
    )
    await engine.start()
    booted = time.monotonic() - started
    try:
        seconds = []
        for number in range(asked.rounds):
            before = time.perf_counter()
            drawn = await drawn_by(engine, PROMPTS, number, asked.tokens)
            seconds.append(time.perf_counter() - before)
        median = statistics.median(seconds[1:] or seconds)
        figures = {
            "what": asked.kind,
            "boot_s": round(booted, 1),
            "seconds": [round(one, 3) for one in seconds],
            "tokens_per_s": round(PROMPTS * SAMPLES * asked.tokens / median),
            "mean_probability": round(
                float(np.exp(np.concatenate([one.logprobs for _, one in drawn])).mean()), 4
            ),
        }
        say(asked.out, **figures)
        mine = drawn[:: max(1, len(drawn) // SCORED)][:SCORED]
        _save(work / f"{asked.kind}.npz", mine)
        if asked.kind == "bf16":
            await _score(engine, asked)
    finally:
        await engine.stop()


def _save(file: Path, drawn: list[tuple[list[int], Sample]]) -> None:
    part = file.with_name("part.npz")
    np.savez(
        part,
        prompts=np.array([prompt for prompt, _ in drawn]),
        tokens=np.array([sample.token_ids for _, sample in drawn]),
        logprobs=np.array([sample.logprobs for _, sample in drawn]),
    )
    part.rename(file)


async def _score(engine: Any, asked: argparse.Namespace) -> None:
    """Have the bfloat16 engine judge the tokens of both, a whole response at once."""
    deadline = time.monotonic() + asked.limit_s
    while not (asked.out / "work" / "fp8.npz").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other engine did not draw its samples")
        await asyncio.sleep(1.0)
    for kind in KINDS:
        drawn = np.load(asked.out / "work" / f"{kind}.npz")
        judged = await asyncio.gather(
            *(
                _judged(engine, f"{kind}-{index}", prompt.tolist(), tokens.tolist())
                for index, (prompt, tokens) in enumerate(zip(drawn["prompts"], drawn["tokens"], strict=True))
            )
        )
        difference = np.abs(np.exp(np.array(judged)) - np.exp(drawn["logprobs"]))
        figures = {
            "what": f"probability difference of tokens that {kind} drew, judged by bf16",
            "tokens": difference.size,
            "mean": round(float(difference.mean()), 5),
            "largest": round(float(difference.max()), 4),
            "mean_probability": round(float(np.exp(drawn["logprobs"]).mean()), 4),
        }
        say(asked.out, **figures)


async def _judged(engine: Any, name: str, prompt: list[int], tokens: list[int]) -> list[float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = [
        output
        async for output in engine.llm.generate(
            {"prompt_token_ids": [*prompt, *tokens]}, params, f"judge-{name}"
        )
    ]
    found = outputs[-1].prompt_logprobs[len(prompt) :]
    return [entry[token].logprob for entry, token in zip(found, tokens, strict=True)]


def _compared(asked: argparse.Namespace) -> int:
    lines = [json.loads(line) for line in (asked.out / "figures.jsonl").read_text().splitlines()]
    speed = {line["what"]: line["tokens_per_s"] for line in lines if "tokens_per_s" in line}
    if set(speed) != set(KINDS):
        print("an engine did not end: see its log", file=sys.stderr)
        return 1
    ratio = speed["fp8"] / speed["bf16"]
    say(asked.out, what="fp8 over bf16", ratio=round(ratio, 3), least=asked.least)
    return 0 if ratio >= asked.least else 1


if __name__ == "__main__":
    sys.exit(main())
