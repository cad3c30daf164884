"""Attention of packed rows on a GPU against that of each sequence alone in float32, with windows and without them.

Each case is a row of bfloat16, whose lengths ask for another kernel, plain or compiled. Prints the worst distance of
the output and of each gradient over the largest number there, beside that of torch's own attention in bfloat16. It
fails where one is more than twice as far away. `row_attention.py --out DIR`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from figures import say

from flotilla_trainer.rank.row_attention import RowLayout, grid_of, within_sequences

HEADS, GROUPS, SIZE = 16, 8, 128
LENGTHS = {
    "one length": (512,) * 8,
    "about one length": tuple(500 + index for index in range(12)),
    "uneven": (1500, 40, 700, 1, 333),
}
WINDOWS = (0, 128)
WORST = 2.0
GPU = torch.device("cuda", 0)


def alone(*parts: torch.Tensor, lengths: tuple[int, ...], scale: float, window: int) -> torch.Tensor:
    """Return the attention of each sequence for itself, by torch's own function."""
    outputs = []
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        heads = [part[start:end].transpose(0, 1)[None] for part in parts]
        visible = torch.ones(end - start, end - start, dtype=torch.bool, device=GPU).tril()
        visible = visible.triu(1 - (window or end))
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=visible, scale=scale, enable_gqa=True
        )
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


def results(act: Callable[..., torch.Tensor], dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    """Return the output of a way to compute attention and the gradients of query, key and value."""
    random = torch.Generator(GPU).manual_seed(0)
    rows = [
        torch.randn(tokens, heads, SIZE, generator=random, device=GPU).bfloat16()
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]
    *parts, slope = (row.to(dtype) for row in rows)
    for part in parts:
        part.requires_grad_()
    output = act(*parts)
    return [output.detach(), *torch.autograd.grad(output, parts, slope)]


def main() -> int:
    """Each row, window and way."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    asked = cli.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = {"plain": within_sequences, "compiled": torch.compile(within_sequences, dynamic=True)}
    worst, scale = 0.0, SIZE**-0.5
    for (name, lengths), window, (way, act) in itertools.product(LENGTHS.items(), WINDOWS, ways.items()):
        layout = RowLayout.of(lengths, GPU, grid_of(lengths, GPU))
        tokens = sum(lengths)
        each = functools.partial(alone, lengths=lengths, scale=scale, window=window)
        packed = functools.partial(act, layout=layout, scale=scale, window=window)
        right, torchs = results(each, torch.float32, tokens), results(each, torch.bfloat16, tokens)
        mine = results(packed, torch.bfloat16, tokens)
        far = [
            [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)]
            for found in (mine, torchs)
        ]
        worst = max(worst, *(a / b for a, b in zip(*far, strict=True)))
        say(
            asked.out,
            row=name,
            window=window,
            way=way,
            grid=layout.numbers.tolist(),
            errors=far[0],
            torchs=far[1],
        )
    say(asked.out, worst_over_torchs=worst, limit=WORST)
    return 0 if worst <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())
