"""Attention of a decode step alone, by kernel: its time, its share of the memory's bandwidth, and its error.

Every sample has one query and a cache of keys and values in blocks of 16 tokens, which lie anywhere in memory. A CUDA
graph calls the kernel once for each of several layers, so many that no call finds its cache in the L2 cache of the GPU.
Kernels: FlashAttention 3 as vLLM calls it in its graphs, the same with one split, FlashAttention 2, the one of vLLM in
Triton, and that of FlashInfer with and without tensor cores. The error is the largest difference from float32 over the
largest value. Prints one JSON object for each and appends it to `figures.jsonl`.
`python bench/gpu/decode_attention.py --out DIR`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import say

BLOCK = 16
HEAD = 128
HEADS = {"0.6b": (16, 8), "8b": (32, 8), "70b-tp8": (8, 1)}
"""Heads of queries, and of keys and values."""
COLD_BYTES = 512 << 20
"""Caches of so many bytes are read between two reads of the same one."""
MOST_BYTES = 24 << 30
REPEATS = 20
Attend = Callable[[int], None]


@dataclass
class Caches:
    """Queries, and the caches of several layers, of one batch."""

    queries: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    table: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(cls, samples: int, tokens: int, heads: tuple[int, int]) -> Caches:
        """Draw them: lengths lie within a tenth of `tokens`, as those of a batch in the middle of a rollout do."""
        random = torch.Generator("cuda").manual_seed(0)
        lengths = torch.randint(
            tokens * 9 // 10, tokens * 11 // 10 + 1, (samples,), device="cuda", generator=random
        )
        blocks = -(-(tokens * 11 // 10) // BLOCK)
        order = torch.randperm(samples * blocks, device="cuda", generator=random)
        layer = 2 * samples * blocks * BLOCK * heads[1] * HEAD * 2
        layers = max(2, min(-(-COLD_BYTES // layer) + 1, MOST_BYTES // layer))

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=random)

        size = (samples * blocks, BLOCK, heads[1], HEAD)
        queries = drawn(samples, heads[0], HEAD)
        return cls(
            queries,
            [drawn(*size) for _ in range(layers)],
            [drawn(*size) for _ in range(layers)],
            order.to(torch.int32).view(samples, blocks),
            lengths.to(torch.int32),
            torch.empty_like(queries),
        )

    @property
    def longest(self) -> int:
        """The number of tokens that a row of the table has room for."""
        return self.table.shape[1] * BLOCK

    def exact(self, layer: int) -> torch.Tensor:
        """Return what float32 gives for the queries."""
        found = []
        group = self.queries.shape[1] // self.keys[layer].shape[2]
        for row, query in enumerate(self.queries.float()):
            length = int(self.lengths[row])
            keys, values = (
                cache[layer][self.table[row]].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                for cache in (self.keys, self.values)
            )
            weights = torch.einsum("hd,thd->ht", query, keys).mul_(HEAD**-0.5).softmax(-1)
            found.append(torch.einsum("ht,thd->hd", weights, values))
        return torch.stack(found)


def flash(caches: Caches, splits: int, version: int = 3) -> Attend:
    """Attend by FlashAttention as the backend of vLLM calls it; version 3 has one plan of the splits for all layers."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    samples, heads, _ = caches.queries.shape
    starts = torch.arange(samples + 1, device="cuda", dtype=torch.int32)
    plan = None
    if version == 3:
        plan = get_scheduler_metadata(
            samples,
            1,
            caches.longest,
            heads,
            caches.keys[0].shape[2],
            HEAD,
            caches.lengths,
            cu_seqlens_q=starts,
            page_size=BLOCK,
            causal=True,
            num_splits=splits,
        )

    def attend(layer: int) -> None:
        flash_attn_varlen_func(
            caches.queries,
            caches.keys[layer],
            caches.values[layer],
            1,
            starts,
            caches.longest,
            seqused_k=caches.lengths,
            causal=True,
            block_table=caches.table,
            out=caches.out,
            scheduler_metadata=plan,
            num_splits=splits,
            fa_version=version,
        )

    return attend


def triton(caches: Caches) -> Attend:
    """Attend by the kernel of vLLM in Triton; few samples are split into segments, as its backend does."""
    from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    samples, heads, _ = caches.queries.shape
    few = MIN_LAUNCH_GRID_SIZE_2D // caches.keys[0].shape[2]
    parts = (few, heads, NUM_PAR_SOFTMAX_SEGMENTS)
    starts = torch.arange(samples + 1, device="cuda", dtype=torch.int32)
    sums, highest, totals = (torch.empty(size, device="cuda") for size in ((*parts, HEAD), parts, parts))

    def attend(layer: int) -> None:
        unified_attention(
            caches.queries,
            caches.keys[layer],
            caches.values[layer],
            caches.out,
            starts,
            1,
            caches.lengths,
            caches.longest,
            HEAD**-0.5,
            True,
            (-1, -1),
            caches.table,
            0,
            None,
            None,
            None,
            seq_threshold_3D=few,
            num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
            softmax_segm_output=sums,
            softmax_segm_max=highest,
            softmax_segm_expsum=totals,
        )

    return attend


def flashinfer(caches: Caches, *, tensor_cores: bool) -> Attend:
    """Attend by the decode of FlashInfer; it compiles its kernel where no compiled one is installed."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    samples, heads, _ = caches.queries.shape
    used = (caches.lengths + BLOCK - 1) // BLOCK
    starts = torch.zeros(samples + 1, device="cuda", dtype=torch.int32)
    starts[1:] = used.cumsum(0)
    rows = torch.cat([row[:count] for row, count in zip(caches.table, used.tolist(), strict=True)])
    last = (caches.lengths - 1) % BLOCK + 1
    workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=rows.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        starts,
        rows,
        last,
        heads,
        caches.keys[0].shape[2],
        HEAD,
        BLOCK,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def attend(layer: int) -> None:
        wrapper.run(caches.queries, (caches.keys[layer], caches.values[layer]), out=caches.out)

    return attend


KERNELS: dict[str, Callable[[Caches], Attend]] = {
    "flash-attention-3, up to 32 splits": partial(flash, splits=32),
    "flash-attention-3, one split": partial(flash, splits=1),
    "flash-attention-2": partial(flash, splits=0, version=2),
    "triton": triton,
    "flashinfer": partial(flashinfer, tensor_cores=False),
    "flashinfer, tensor cores": partial(flashinfer, tensor_cores=True),
}


def microseconds(attend: Attend, layers: int) -> float:
    """Return what one call takes in a graph of a call for each layer."""
    for _ in range(3):
        attend(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            attend(layer)
    took = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1000 / layers)
    return statistics.median(took)


def measure(caches: Caches, attend: Attend, bandwidth: float) -> dict[str, Any]:
    """Return the figures of one kernel on one batch."""
    attend(0)
    expected = caches.exact(0)
    error = float((caches.out.float() - expected).abs().max() / expected.abs().max())
    one = microseconds(attend, len(caches.keys))
    read = 2 * int(caches.lengths.sum()) * caches.keys[0].shape[2] * HEAD * 2
    return {
        "us": round(one, 1),
        "of_bandwidth": round(read / one * 1e6 / bandwidth, 3),
        "error": round(error, 5),
        "layers": len(caches.keys),
    }


def main() -> int:
    """Every kernel on every batch."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--shapes", choices=HEADS, nargs="+", default=["0.6b", "8b"])
    cli.add_argument("--samples", type=int, nargs="+", default=[32, 128, 256])
    cli.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    cli.add_argument("--kernels", choices=KERNELS, nargs="+", default=list(KERNELS))
    cli.add_argument("--bandwidth", type=float, help="bytes a second; else what a copy on this GPU reaches")
    asked = cli.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    bandwidth = asked.bandwidth or copied()
    say(asked.out, what="bandwidth", bytes_a_second=bandwidth, gpu=torch.cuda.get_device_name())
    for shape in asked.shapes:
        for samples in asked.samples:
            for tokens in asked.tokens:
                if 2 * 2 * samples * tokens * HEADS[shape][1] * HEAD * 2 > MOST_BYTES:
                    continue
                caches = Caches.of(samples, tokens, HEADS[shape])
                batch = {"shape": shape, "samples": samples, "tokens": tokens}
                for name in asked.kernels:
                    try:
                        figures = measure(caches, KERNELS[name](caches), bandwidth)
                    except (ImportError, OSError, RuntimeError, ValueError) as error:
                        figures = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
                    say(asked.out, **batch, kernel=name, **figures)
    return 0


def copied() -> float:
    """Return the bytes a second that a copy of 4 GiB reads and writes."""
    source = torch.empty(4 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        target.copy_(source)

    one = microseconds(copy, 2)
    return 2 * source.nbytes / one * 1e6


if __name__ == "__main__":
    sys.exit(main())
