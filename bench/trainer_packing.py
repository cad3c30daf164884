"""What packing saves: padding, and time of an update, on lengths with a long tail."""

from __future__ import annotations

import torch
from one_rank import GPU, long_tailed, micro_batches, one_rank, seconds, sequences, settings, update
from qwen3_shape import QWEN3_0_6B
from table import Row

from flotilla_trainer.batch.packing import fed_tokens, padding_share
from flotilla_trainer.rank.optimizer import PolicyOptimizer

BAR = 0.05
CHUNK_TOKENS = 2048
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SIZE = (64, 512, 2048)
if GPU:
    SHAPE = QWEN3_0_6B
    SIZE = (256, 4096, 16_384)


def measure() -> list[Row]:
    """Padding and speed of both layouts."""
    count, longest, budget = SIZE
    given = sequences(long_tailed(count, longest), SHAPE["vocab_size"])
    rows = []
    speeds = {}
    with one_rank(torch.bfloat16 if GPU else torch.float32, **SHAPE) as (model, _):
        optimizer = PolicyOptimizer(model, settings().optimizer)
        for packed, name in ((False, "padded rows"), (True, "packed rows")):
            batches = micro_batches(given, budget, packed)
            share = padding_share([batches])
            spent = seconds(
                lambda batches=batches: update(model, optimizer, batches, CHUNK_TOKENS), repeats=2
            )
            speeds[packed] = given.lengths.sum() / spent
            rows += [
                Row(
                    f"padding of {name}, {count} sequences of 16 to {longest} tokens",
                    f"{share:.1%} of {fed_tokens([batches]):,}",
                    f"< {BAR:.0%}" if packed else "",
                    share < BAR if packed else None,
                ),
                Row(f"  update on {name}, {len(batches)} micro-batches", f"{speeds[packed]:,.0f} tokens/s"),
            ]
    rows.append(Row("  packed against padded rows", f"{speeds[True] / speeds[False]:.2f} x"))
    return rows
