"""The trainer's two heaviest operations alone: the head, fused and plain, and attention over a packed row by kernel."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from one_rank import GPU, finish_kernels, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from trainer_work import Record, shape

from flotilla_trainer.rank import fused_head, packed_rows
from flotilla_trainer.rank.fused_head import PLAIN, head_scores
from flotilla_trainer.rank.head_rules import HeadRules
from flotilla_trainer.rank.row_attention import Grid, RowLayout, within_sequences

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
REPEATS = 5
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def head_alone(asked: argparse.Namespace, record: Record) -> int:
    """Time forward and backward of the head on one micro-batch, fused and plain, and the memory that both take."""
    sizes, tokens = shape(asked.shape), asked.budget
    dtype = torch.bfloat16 if GPU else torch.float32
    random = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE, generator=random).to(dtype).mul_(0.05).requires_grad_()

    hidden, weight = drawn(tokens, sizes["hidden_size"]), drawn(sizes["vocab_size"], sizes["hidden_size"])
    targets = torch.randint(sizes["vocab_size"], (tokens,), device=DEVICE, generator=random)
    kernels = fused_head.operations_on
    for name, chosen in (("fused", kernels), ("plain", lambda device: PLAIN)):
        fused_head.operations_on = chosen
        for entropy_gradient in (False, True):

            def pass_of_head(entropy_gradient: bool = entropy_gradient) -> None:
                scores = head_scores(
                    hidden,
                    weight,
                    None,
                    targets,
                    rules=HeadRules(),
                    chunk_tokens=asked.chunk,
                    entropy_gradient=entropy_gradient,
                )
                torch.autograd.grad(
                    sum(part.sum() for part in scores if part.requires_grad), (hidden, weight)
                )

            if GPU:
                torch.cuda.reset_peak_memory_stats()
            best = seconds(pass_of_head, REPEATS)
            record.say(
                head=name,
                entropy_gradient=entropy_gradient,
                tokens=tokens,
                seconds=round(best, 5),
                of_an_update_s=round(best * 131_072 / tokens, 4),
                peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else None,
            )
    fused_head.operations_on = kernels
    return 0


def attention_alone(asked: argparse.Namespace, record: Record) -> int:
    """Time forward and backward of one layer's attention by each kernel that this host has, and compare results."""
    sizes = shape(asked.shape)
    length = asked.prompt_tokens + asked.response_tokens
    count = max(1, asked.budget // length)
    heads, groups, size = (sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    dtype = torch.bfloat16 if GPU else torch.float32
    random = torch.Generator(DEVICE).manual_seed(0)
    tokens = count * length
    given = [
        torch.randn(tokens, part, size, device=DEVICE, generator=random).to(dtype).requires_grad_()
        for part in (heads, groups, groups)
    ]
    slope = torch.randn(tokens, heads, size, device=DEVICE, generator=random).to(dtype)
    row = packed_rows.PackedRow.of([length] * count, DEVICE)
    right: list[torch.Tensor] = []
    for name, kernel in _kernels(row, count, length, heads // groups).items():
        facts: dict[str, Any] = {"attention": name, "rows": count, "length": length}
        started = time.perf_counter()
        try:
            output = kernel(*given)
            found = [output.detach(), *torch.autograd.grad(output, given, slope)]
            finish_kernels()
            facts["first_ms"] = round(1e3 * (time.perf_counter() - started), 1)
            right = right or found
            forward = seconds(lambda kernel=kernel: kernel(*given), REPEATS)  # type: ignore[misc]
            both = seconds(
                lambda kernel=kernel: torch.autograd.grad(kernel(*given), given, slope),  # type: ignore[misc]
                REPEATS,
            )
        except (RuntimeError, TypeError, AttributeError) as error:
            record.say(**facts, refused=str(error).splitlines()[0])
            finish_kernels()
            continue
        facts["forward_ms"], facts["both_ms"] = round(1e3 * forward, 3), round(1e3 * both, 3)
        apart = [
            float((mine.float() - other.float()).norm() / other.float().norm())
            for mine, other in zip(found, right, strict=True)
        ]
        record.say(**facts, apart=[round(value, 5) for value in apart])
    return 0


def _kernels(row: packed_rows.PackedRow, count: int, length: int, group: int) -> dict[str, Kernel]:
    """Return every way to compute causal attention over rows of one length: [tokens, heads, size] in and out."""

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value)
        )
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=group > 1)
        return output.transpose(1, 2).flatten(0, 1)

    def by(backend: SDPBackend) -> Kernel:
        def chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return dense(query, key, value)

        return chosen

    def trained(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: packed_rows.PackedRow = row
    ) -> torch.Tensor:
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        return packed_rows.packed_attention(torch.nn.Identity(), *heads, None, packed_row=row)[0][0]

    without_grid = replace(row, layout=RowLayout.of(row.lengths, DEVICE, None))

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return trained(query, key, value, without_grid)

    def repeated(kernel: Kernel) -> Kernel:
        return lambda query, key, value: kernel(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        )

    def filled_up(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grid = Grid.filled_up(row.lengths)
        if grid is None:
            raise RuntimeError("a grid would be filling for the most part")
        return within_sequences(query, key, value, RowLayout.of(row.lengths, DEVICE, grid), None)

    return {
        "packed row, as trained": trained,
        "packed row, flash": flash,
        "packed row, on a grid that is filled up": filled_up,
        "packed row, heads repeated": repeated(flash),
        "dense, flash": by(SDPBackend.FLASH_ATTENTION),
        "dense, cuDNN": by(SDPBackend.CUDNN_ATTENTION),
    }
