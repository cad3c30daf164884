"""What a rank needs beyond its state: the log-probability pass by chunk, an update by its options, and the estimate."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from one_rank import (
    GPU,
    forward,
    give_freed_memory_back,
    micro_batches,
    one_rank,
    peak_bytes,
    sequences,
    settings,
    update,
)
from qwen3_shape import QWEN3_0_6B
from table import Row

from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import TrainerMemory
from flotilla_core.config import BatchingConfig, OptimizerConfig, RunConfig, TrainerConfig
from flotilla_trainer.rank.optimizer import PolicyOptimizer

TOLERANCE = 0.25
DTYPE = "bfloat16" if GPU else "float32"
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LENGTH, TOKENS, CHUNKS = 64, 4096, (64, 256, 1024)
if GPU:
    SHAPE = QWEN3_0_6B
    LENGTH, TOKENS, CHUNKS = 1024, 16_384, (512, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """One measurement, in a process of its own because peaks do not go down again."""

    what: str
    tokens: int = TOKENS
    chunk: int = CHUNKS[0]
    batching: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def measure() -> list[Row]:
    """Log-probabilities by chunk and by tokens, then updates against the estimate."""
    return [*_scoring_rows(), *_update_rows()]


def _scoring_rows() -> list[Row]:
    peaks = {chunk: _alone(_score_peak, Case("score", chunk=chunk)) for chunk in CHUNKS}
    longer = _alone(_score_peak, Case("score", tokens=2 * TOKENS))
    all_logits = TOKENS * SHAPE["vocab_size"] * 4
    rows = [
        Row(f"log-probabilities of {TOKENS:,} tokens, chunks of {chunk:,}", _mib(peak))
        for chunk, peak in peaks.items()
    ]
    small = peaks[CHUNKS[0]]
    return [
        *rows,
        Row(f"  of {2 * TOKENS:,} tokens, chunks of {CHUNKS[0]:,}", _mib(longer)),
        Row("  all logits at once would be", _mib(all_logits)),
        Row(
            f"  share of them at chunks of {CHUNKS[0]:,}",
            f"{small / all_logits:.0%}",
            "< 35%",
            small < 0.35 * all_logits,
        ),
        Row(
            "  what twice the tokens add, against all their logits",
            f"{(longer - small) / all_logits:.0%}",
            "< 20%",
            longer - small < 0.2 * all_logits,
        ),
    ]


def _update_rows() -> list[Row]:
    cases = [
        Case("update, padded rows"),
        Case("update, packed rows", batching={"packing": "on"}),
        Case("update, activation checkpointing", batching={"activation_checkpointing": True}),
    ]
    if GPU:  # elsewhere the moments go from one place in host memory to another
        cases.append(Case("update, moments offloaded", optimizer={"offload": True}))
        resting = {"activation_checkpointing": True, "activation_offload": True}
        cases.append(Case("update, activation checkpointing, inputs offloaded", batching=resting))
    rows = []
    for case in cases:
        measured, estimated = _alone(_update_peak, case)
        off = estimated / measured - 1
        rows.append(
            Row(
                f"{case.what}, {TOKENS:,} tokens",
                f"{_mib(measured)}, estimated {_mib(estimated)}",
                f"within {TOLERANCE:.0%}",
                abs(off) < TOLERANCE,
            )
        )
    return rows


def _alone(act: Any, case: Case) -> Any:
    # Neither CUDA nor the threads of an earlier measurement survive a fork.
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, initializer=give_freed_memory_back) as process:
        return process.submit(act, case).result()


def _score_peak(case: Case) -> int:
    given = sequences(np.full(case.tokens // LENGTH, LENGTH), SHAPE["vocab_size"])
    with one_rank(getattr(torch, DTYPE), **SHAPE) as (model, _), torch.no_grad():
        (batch,) = micro_batches(given, case.tokens, packed=False)
        forward(model, micro_batches(sequences(np.array([8]), 100), 8, packed=False)[0], 8)
        return peak_bytes(lambda: forward(model, batch, case.chunk))


def _update_peak(case: Case) -> tuple[int, int]:
    """Measured and estimated bytes of a rank's second update, its state included."""
    given = sequences(np.full(case.tokens // LENGTH, LENGTH), SHAPE["vocab_size"])
    packed = case.batching.get("packing") == "on"
    with one_rank(getattr(torch, DTYPE), **SHAPE) as (model, folder):
        model.recomputed_layers.on = case.batching.get("activation_checkpointing", False)
        model.recomputed_layers.inputs_rest_on_host = case.batching.get("activation_offload", False)
        optimizer = PolicyOptimizer(model, settings(**case.optimizer).optimizer)
        batches = micro_batches(given, case.tokens // 2, packed)
        update(model, optimizer, batches[:1], case.chunk)
        state = sum(parameter.numel() for parameter in model.parameters()) * (4 if case.optimizer else 12)
        measured = state + peak_bytes(lambda: update(model, optimizer, batches, case.chunk))
        facts = ModelFacts.read(folder)
    run = RunConfig.model_validate(
        {
            "name": "memory",
            "steps": 1,
            "algorithm": {"type": "sft"},
            "data": {"train": "none.jsonl"},
            "batching": BatchingConfig(
                tokens_per_microbatch=case.tokens // 2, logprob_chunk_tokens=case.chunk, **case.batching
            ),
            "optimizer": OptimizerConfig(**case.optimizer),
        }
    )
    return measured, TrainerMemory.of(facts, run, TrainerConfig(dtype=DTYPE), LENGTH).total


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
