"""Whole updates of the trainer on GPUs: tokens a second, MFU, seconds of each part, peak memory.

`python bench/gpu/trainer.py` trains a Qwen3-0.6B shape on 32 prompts x 8 samples x 512 tokens, as the benches of the
whole loop do, through a rank's own model, objective, update and optimizer, without a front and without gRPC.
`--shape 8b --ranks 2` trains an 8B shape on rows of 4,096 tokens, sharded over two GPUs. Each line says what the rank
holds of its GPU, and what the driver says that everybody does; with `--room` something else holds the rest of the GPU,
as a generator does. `--profile` adds the kernels that took longest; `--head` and `--attention` measure these alone, by
kernel; `--check` compares the fast path with plain torch operations on the same weights, in float32 and bfloat16, over
ten updates. Without a GPU all of it runs on a small shape. Weights are drawn on the device. The bench ends within
`--limit-s`, whatever hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from one_rank import GPU
from torch._dynamo.utils import counters
from trainer_check import checked
from trainer_kernels import attention_alone, head_alone
from trainer_work import SHAPES, WORK, Line, Record, Trainer, micro_batches, session, shape
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_core.config import BatchingConfig
from flotilla_trainer.rank.compilation import Compilation
from flotilla_trainer.rank.cut import RankMesh, local
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_weights.device_memory import ExportedMemory

PEAK_FLOPS = 989e12
"""Of an H100 or H200 in bfloat16, without sparsity."""
CHILD = "FLOTILLA_BENCH_RANK"


def main() -> int:
    """Measure, or compare."""
    asked = _asked()
    if asked.ranks > 1 and CHILD not in os.environ:
        return gang(asked)
    rank = int(os.environ.get(CHILD, "0"))
    names = [name for name in ("check", "head", "attention") if getattr(asked, name)]
    name = "-".join(["trainer", asked.shape, *names, str(asked.budget), str(asked.ranks)])
    record = Record(asked.out if rank == 0 else None, name)
    if asked.check:
        return checked(asked, record)
    if asked.head:
        return head_alone(asked, record)
    if asked.attention:
        return attention_alone(asked, record)
    return measured(asked, rank, record)


def _asked() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--shape", choices=tuple(SHAPES), default="0.6b" if GPU else "small")
    cli.add_argument("--ranks", type=int, default=1, help="ranks that share the weights, a GPU each")
    cli.add_argument("--prompts", type=int, help="for each rank")
    cli.add_argument("--samples", type=int)
    cli.add_argument("--prompt-tokens", type=int)
    cli.add_argument("--response-tokens", type=int)
    cli.add_argument("--budget", type=int, help="tokens of a micro-batch")
    cli.add_argument("--chunk", type=int, default=BatchingConfig().logprob_chunk_tokens)
    cli.add_argument("--updates", type=int, default=8)
    cli.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    cli.add_argument("--recompute", choices=("off", "selective", "layers"), default="off")
    cli.add_argument("--profile", action="store_true")
    cli.add_argument("--head", action="store_true")
    cli.add_argument("--attention", action="store_true")
    cli.add_argument("--check", action="store_true")
    cli.add_argument("--room", type=float, help="GiB that a rank may use beside its context")
    cli.add_argument("--limit-s", type=float, default=240.0, help="the most seconds that a gang may take")
    cli.add_argument("--out", type=Path, help="a folder for JSON lines and tables of profiles")
    asked = cli.parse_args()
    for key, value in WORK[asked.shape].items():
        if getattr(asked, key) is None:
            setattr(asked, key, value)
    return asked


def gang(asked: argparse.Namespace) -> int:
    """Run this program once for each rank; end all of them when one fails or the time is over."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-gang-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={
                    # Multicast over NVLink is not needed here, and not every host lends it.
                    "NCCL_NVLS_ENABLE": "0",
                    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                    **os.environ,
                    CHILD: str(rank),
                    "FLOTILLA_BENCH_MEETING": folder,
                },
            )
            for rank in range(asked.ranks)
        ]
        ends = time.monotonic() + asked.limit_s
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > ends:
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
    if any(codes):
        print(f"the ranks ended with {codes}; -9 after {asked.limit_s:g} s or the end of another", flush=True)
    return 1 if any(codes) else 0


@contextlib.contextmanager
def drawn_model(asked: argparse.Namespace, rank: int, *, cpu_offload: bool = False) -> Iterator[ShardedModel]:
    """A model of the asked shape, sharded over the ranks, with weights that each rank drew for its own shards."""
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-model-") as name:
        Qwen3Config(**shape(asked.shape)).save_pretrained(name)
        meeting = Path(os.environ.get("FLOTILLA_BENCH_MEETING", name)) / "rendezvous"
        store = dist.FileStore(str(meeting), asked.ranks)
        dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=rank, world_size=asked.ranks)
        try:
            model = ShardedModel(
                Path(name),
                torch.bfloat16 if GPU else torch.float32,
                RankMesh.form(device.type),
                device,
                cpu_offload=cpu_offload,
            )
            _draw(model, asked.shape, rank)
            yield model
        finally:
            dist.destroy_process_group()


def _draw(model: ShardedModel, name: str, rank: int) -> None:
    """Draw matrices, set norms to one, and take the buffers, which depend on no size but that of heads, of another."""
    random = torch.Generator(model.device).manual_seed(rank)
    for parameter in model.parameters():
        own = local(parameter.detach())
        if parameter.ndim > 1:
            # On the device, also where the weights rest in host memory.
            drawn = torch.empty_like(own, device=model.device)
            own.copy_(drawn.normal_(0, shape(name)["initializer_range"], generator=random))
        else:
            own.fill_(1.0)
    tiny = {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8}
    buffers = dict(Qwen3ForCausalLM(Qwen3Config(**shape(name, **tiny))).named_buffers())
    for key, buffer in model.causal_lm.named_buffers():
        buffer.copy_(buffers[key])


def measured(asked: argparse.Namespace, rank: int, record: Record) -> int:
    """Train some updates; the first rank prints one line for each, and the medians."""
    if asked.room is not None:
        take_away(asked.room, rank)
    with drawn_model(asked, rank) as model:
        say = record.say if rank == 0 else _nothing
        compilation = Compilation(asked.compile, model.device, Line().progress)
        say(at="drawn", **memory())
        assert compilation.begin(model, packed=True), compilation.refusal
        model.recomputed_layers.on = asked.recompute == "layers"
        model.selective_layers.on = asked.recompute == "selective"
        say(
            compiled=model.compiled_layers.on,
            refusal=compilation.refusal,
            **compilation.metrics(),
            **memory(),
        )
        trainer = Trainer(model, session(asked.chunk))
        say(at="optimizer", **memory())
        say(planned_gib=trainer.planned_gib(asked.budget), **memory())
        packed = micro_batches(asked)
        fed, scored = (
            sum(count(batch) for batches in packed for batch in batches)
            for count in (lambda batch: batch.sequence_tokens, lambda batch: len(batch.places))
        )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds: list[float] = []
        for number in range(asked.updates):
            found = trainer.update(packed[rank])
            if number > 1:
                seconds.append(found["seconds"])
            say(update=number, **found, **compilation.metrics(), **memory())
        middle = statistics.median(seconds)
        say(
            shape=asked.shape,
            ranks=asked.ranks,
            device=torch.cuda.get_device_name() if GPU else "cpu",
            budget=asked.budget,
            recompute=asked.recompute,
            tokens=fed,
            scored_tokens=scored,
            parameters=parameters,
            micro_batches=len(packed[rank]),
            median_s=round(middle, 4),
            response_tokens_per_s=round(scored / middle),
            tokens_per_s=round(fed / middle),
            mfu=round(6 * parameters * fed / middle / PEAK_FLOPS / asked.ranks, 4),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else None,
            reserved_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if GPU else None,
            retries=torch.cuda.memory_stats()["num_alloc_retries"] if GPU else None,
            graphs=counters["stats"]["unique_graphs"],
            graph_breaks=dict(counters["graph_break"]),
        )
        # Of ranks that work together: all of them lack the memory for so much, and none goes on alone.
        say(fits=trainer.fitting(128 * asked.budget))
        if asked.profile:
            table, busy = profiled(lambda: trainer.update(packed[rank]))
            if rank == 0:
                record.keep(table)
                say(profiled_kernel_s=busy)
    return 0


def take_away(room_gib: float, rank: int) -> None:
    """Leave a rank so many GiB of its GPU; the others are taken until this process ends, past torch's allocator."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info()
    ExportedMemory(int(free - room_gib * 2**30), device)


def memory() -> dict[str, float]:
    """Return what this rank holds of its GPU in GiB: tensors, what torch keeps, their peaks, and all that is taken."""
    if not GPU:
        return {}
    free, total = torch.cuda.mem_get_info()
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "taken_of_the_gpu": total - free,
    }
    return {f"{name}_gib": round(size / 2**30, 2) for name, size in found.items()}


def profiled(act: Callable[[], Any]) -> tuple[str, float]:
    """Return what took longest in one call, of the GPU and of the host, and the seconds of all kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    with profile(activities=activities) as found:
        act()
    averages = found.key_averages()
    orders = [*(["self_device_time_total"] if GPU else []), "self_cpu_time_total"]
    tables = [averages.table(sort_by=order, row_limit=120, max_name_column_width=110) for order in orders]
    # An operation and a range have the time of their kernels once more.
    kernels = [e for e in averages if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return "\n".join(tables), round(sum(kernel.self_device_time_total for kernel in kernels) / 1e6, 4)


def _nothing(**facts: Any) -> None:
    """Let the first rank speak."""


if __name__ == "__main__":
    sys.exit(main())
