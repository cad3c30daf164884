"""Samples a second of one generator alone, through gRPC and with log-probabilities, against bare vLLM without them.

Both decode the model of smoke.py on one GPU, one after the other: the generator as a service of a stack without a
trainer, then vLLM's own `LLM` without a tokenizer. Each amount of work is done `--rounds` times, on new prompts each
time, and the first round is not counted. Prints one JSON object for each amount and appends it to `figures.jsonl`.
`cpu_s` are seconds of the service's process and of those below it. `--only` does one of the two, so that two GPUs can
do both at once. `python bench/gpu/rollout.py --out DIR`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import say

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla_core import rpc
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_generator.engine.base import Engine, GenerationRequest, Sample, SampleSlot, Sampling
from flotilla_testing.stack import Stack, running_stack

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 8
PROMPT_TOKENS = 100
VOCABULARY = 16
"""Prompts are of the first tokens, which every model has."""
GATHER_S = 0.25
RUNNING = 1024
LONGEST = 1024
IDLE_S = 120.0


def prompts(count: int, round_: int) -> Iterator[list[int]]:
    """Yield prompts that no other round has."""
    random = np.random.default_rng(1000 * count + round_)
    for _ in range(count):
        yield random.integers(2, VOCABULARY, PROMPT_TOKENS).tolist()


async def drawn_by(engine: Engine, count: int, round_: int, tokens: int) -> list[tuple[list[int], Sample]]:
    """Let an engine without a service draw the samples of a round; return each with its prompt."""

    async def one(index: int, prompt: list[int]) -> list[tuple[list[int], Sample]]:
        name = f"{count}-{round_}-{index}"
        slots = tuple(SampleSlot(f"{name}/{seed}", seed) for seed in range(SAMPLES))
        sampling = Sampling(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(name, prompt, slots, sampling)
        return [(prompt, sample) async for ended in engine.generate(request) for sample in ended]

    groups = await asyncio.gather(*(one(*each) for each in enumerate(prompts(count, round_))))
    drawn = [sample for group in groups for sample in group]
    assert sum(len(sample.token_ids) for _, sample in drawn) == count * SAMPLES * tokens
    return drawn


def main() -> int:
    """The generator, then bare vLLM."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--prompts", type=int, nargs="+", default=[32, 128])
    cli.add_argument("--tokens", type=int, default=512)
    cli.add_argument("--rounds", type=int, default=4)
    cli.add_argument("--model", type=Path, help="a model to take instead of the random one")
    cli.add_argument("--boots", type=int, default=1, help="starts of the fleet; the last one is measured")
    cli.add_argument("--only", choices=("service", "bare"))
    asked = cli.parse_args()
    work: Path = asked.out / "work"
    if not (work / "model").exists():
        work.mkdir(parents=True)
        if asked.model is not None:
            shutil.copytree(asked.model, work / "model")
        else:
            make_model(work)
    if asked.only == "bare":
        _bare(work / "model", asked)
        return 0
    description = {
        "name": "rollout",
        "model": str(work / "model"),
        "generator": {
            "dtype": "bfloat16",
            "max_model_tokens": LONGEST,
            "max_running_samples": RUNNING,
            "memory_fraction": 0.8,
        },
        "trainer": {"replicas": 0},
    }
    try:
        for boot in range(1, asked.boots + 1):
            started = time.monotonic()
            with running_stack(description, work) as stack:
                say(asked.out, what="up", boot=boot, seconds=round(time.monotonic() - started, 1))
                if boot == asked.boots:
                    asyncio.run(_service(stack, asked))
    finally:
        for log in (work / "state" / "rollout" / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
    if asked.only is None:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", "bare"], check=True)
    return 0


def make_model(work: Path) -> None:
    """Write the model of smoke.py to the folder `model`."""
    from smoke import make_random_model

    script = ROOT / "examples/arithmetic/make_model.py"
    subprocess.run([sys.executable, script, "--out", work / "tokenizer"], check=True)
    make_random_model(work / "model", work / "tokenizer")


async def _service(stack: Stack, asked: argparse.Namespace) -> None:
    channel = stack.channel("generator-0")
    try:
        stub = GeneratorServiceStub(channel)
        for count in asked.prompts:
            seconds, cpu = [], []
            for round_ in range(asked.rounds):
                before, started = _cpu_seconds(stack), time.perf_counter()
                asking = [
                    _generate(stub, f"{count}-{round_}-{number}", prompt, asked.tokens)
                    for number, prompt in enumerate(prompts(count, round_))
                ]
                assert sum(await asyncio.gather(*asking)) == count * SAMPLES * asked.tokens
                seconds.append(time.perf_counter() - started)
                cpu.append({name: used - before.get(name, 0) for name, used in _cpu_seconds(stack).items()})
            _report("service", count, asked, seconds, cpu_s=cpu[-1])
    finally:
        await channel.close()


async def _generate(stub: Any, name: str, prompt: list[int], tokens: int) -> int:
    """Ask for the samples of one prompt; the number of tokens that came, each with its log-probability."""
    request = pb.GenerateRequest(
        run_id="rollout",
        request_id=name,
        prompt_token_ids=to_tensor(np.array(prompt, np.int32)),
        samples=[pb.SampleSlot(sample_id=f"{name}/{index}", seed=index) for index in range(SAMPLES)],
        sampling=pb.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True),
    )
    request.gather.FromMilliseconds(int(1000 * GATHER_S))
    came = 0
    async for response in rpc.server_stream(stub.Generate, request, idle_timeout_s=IDLE_S):
        for sample in response.samples:
            came += min(from_tensor(sample.token_ids).size, from_tensor(sample.logprobs).size)
    return came


def _cpu_seconds(stack: Stack) -> dict[str, float]:
    """Return the CPU seconds of the generator's processes so far, by name."""
    service = stack.process("generator-0")
    used: dict[str, float] = {}
    for process in (service, *service.children(recursive=True)):
        times = process.cpu_times()
        name = "service" if process == service else process.name()
        used[name] = used.get(name, 0.0) + times.user + times.system
    return used


def _bare(model: Path, asked: argparse.Namespace) -> None:
    # A forked engine would hang in the threads that made the model here.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import torch
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {"max_num_seqs": RUNNING, "max_model_len": LONGEST, "dtype": "bfloat16"}
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": 0.8,
            "max_num_batched_tokens": 16_384,
            "compilation_config": {"max_cudagraph_capture_size": RUNNING},
        }
    llm = LLM(str(model), skip_tokenizer_init=True, **arguments)
    params = SamplingParams(temperature=1.0, max_tokens=asked.tokens, ignore_eos=True, detokenize=False)
    for count in asked.prompts:
        seconds = []
        for round_ in range(asked.rounds):
            started = time.perf_counter()
            wanted = [
                {"prompt_token_ids": prompt} for prompt in prompts(count, round_) for _ in range(SAMPLES)
            ]
            outputs = llm.generate(wanted, params, use_tqdm=False)
            came = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert came == count * SAMPLES * asked.tokens
            seconds.append(time.perf_counter() - started)
        _report("bare", count, asked, seconds)


def _report(what: str, count: int, asked: argparse.Namespace, seconds: list[float], **more: Any) -> None:
    median = statistics.median(seconds[1:])
    say(
        asked.out,
        what=what,
        work=f"{count}x{SAMPLES}x{asked.tokens}",
        seconds=[round(one, 3) for one in seconds],
        tokens_per_s=round(count * SAMPLES * asked.tokens / median),
        ms_a_token_of_each=round(1000 * median / asked.tokens, 3),
        **more,
    )


if __name__ == "__main__":
    sys.exit(main())
