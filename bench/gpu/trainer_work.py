"""The work of the trainer's benches: shapes of models, batches of random tokens, and the parts of a rank that train."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from one_rank import finish_kernels, settings
from qwen3_shape import SMALL
from random_model import SHAPES as REAL

from flotilla_core.config import BatchingConfig, OptimizerConfig, PolicyConfig
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.rank.compilation import one_pass
from flotilla_trainer.rank.device_memory import PROBE_SEQUENCE, MicroBatchMemory
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.wire.frames import Frame
from flotilla_trainer.wire.objective import POLICY, ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings

SHAPES = {name: REAL[name] for name in ("0.6b", "1.7b", "4b", "8b")} | {"small": SMALL}
WORK = {
    "0.6b": {"prompts": 32, "samples": 8, "prompt_tokens": 100, "response_tokens": 512, "budget": 16_384},
    "1.7b": {"prompts": 16, "samples": 8, "prompt_tokens": 100, "response_tokens": 1024, "budget": 16_384},
    "4b": {"prompts": 8, "samples": 8, "prompt_tokens": 100, "response_tokens": 1024, "budget": 8192},
    "8b": {"prompts": 4, "samples": 4, "prompt_tokens": 512, "response_tokens": 3584, "budget": 8192},
    "small": {"prompts": 2, "samples": 2, "prompt_tokens": 7, "response_tokens": 19, "budget": 64},
}
"""What a shape is trained on where nothing else is asked for; the counts are for each rank."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, epsilon=1e-5, max_grad_norm=0)
"""The epsilon keeps AdamW from turning the rounding of tiny gradients into whole steps."""


class Line:
    """A front that only listens."""

    def progress(self, phase: str) -> None:
        """Nobody asks how far this rank has come."""

    def moved(self) -> None:
        """Nobody asks how far this rank has come."""


class Trainer:
    """The parts of a rank that make an update."""

    def __init__(self, model: ShardedModel, settings: SessionSettings) -> None:
        self._model = model
        self._settings = settings
        self._objective = Objective(settings.objective)
        self._memory = MicroBatchMemory(model.device, self._probe)
        self.optimizer = PolicyOptimizer(model, settings.optimizer)

    def accumulate(self, batches: list[MicroBatch]) -> Update:
        """Run forward and backward over all micro-batches."""
        update = Update(self._model, self._settings, self._objective, Line(), self._memory)
        update.accumulate(command(batches), backward=True)
        return update

    def planned_gib(self, tokens: int) -> float:
        """Return the memory that a rank holds at most with micro-batches of so many tokens, by what it measured."""
        held = torch.cuda.memory_allocated() if self._model.device.type == "cuda" else 0
        return round((held + self._memory.require(tokens)) / 2**30, 2)

    def fitting(self, tokens: int) -> int:
        """Return how many tokens a micro-batch may have on these ranks, of those asked for."""
        return self._memory.fitting(tokens)

    def _probe(self, tokens: int, again: Callable[[], None]) -> None:
        one_pass(self._model, [PROBE_SEQUENCE] * (tokens // PROBE_SEQUENCE), True, again)

    def update(self, batches: list[MicroBatch]) -> dict[str, Any]:
        """Make one update and return its loss and the seconds of its parts."""
        finish_kernels()
        started = time.perf_counter()
        update = self.accumulate(batches)
        submitted = time.perf_counter()
        finish_kernels()
        computed = time.perf_counter()
        metrics, skipped = finish(update, self.optimizer, self._settings.optimizer.learning_rate)
        finish_kernels()
        ended = time.perf_counter()
        assert not skipped, skipped
        return {
            "seconds": round(ended - started, 4),
            "forward_backward_s": round(computed - started, 4),
            "host_s": round(submitted - started, 4),
            "optimizer_s": round(ended - computed, 4),
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "entropy": metrics["entropy"],
        }


def shape(name: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a shape."""
    drawn = {"initializer_range": 0.2 if name == "small" else 0.02, "max_position_embeddings": 40_960}
    return {"tie_word_embeddings": True} | drawn | SHAPES[name] | changes


def given_answers(chunk_tokens: int) -> SessionSettings:
    """Return the settings of a session that raises and lowers given answers by their weights."""
    return replace(
        settings(), optimizer=OPTIMIZER, batching=BatchingConfig(logprob_chunk_tokens=chunk_tokens)
    )


def session(chunk_tokens: int) -> SessionSettings:
    """Return the settings of a GRPO session with the defaults of everything but the chunk."""
    return replace(
        settings(),
        objective=ObjectiveSettings(POLICY, PolicyConfig(), max_response_tokens=512),
        batching=BatchingConfig(logprob_chunk_tokens=chunk_tokens),
    )


def work(asked: argparse.Namespace) -> Sequences:
    """Random prompts and responses, with every column that GRPO reads."""
    random = np.random.default_rng(0)
    vocabulary = shape(asked.shape)["vocab_size"]
    count = asked.prompts * asked.samples * asked.ranks
    lengths = np.full(count, asked.prompt_tokens + asked.response_tokens)
    ends = np.cumsum(lengths)
    scored = np.concatenate([np.arange(end - asked.response_tokens, end) for end in ends])
    total = len(scored)
    advantages = np.repeat(random.normal(0, 1, count), asked.response_tokens).astype(np.float32)
    return Sequences(
        random.integers(0, vocabulary, int(lengths.sum())).astype(np.int32),
        lengths,
        scored,
        {
            # Given answers have no advantages; what counts of them is in their weights.
            "weights": advantages / np.float32(total)
            if asked.check
            else np.full(total, 1 / total, np.float32),
            "advantages": advantages,
            "rollout_logprobs": np.full(total, -np.log(vocabulary), np.float32),
            "fresh": np.ones(total, np.float32),
            "sequences": np.repeat(np.arange(count), asked.response_tokens).astype(np.float32),
        },
    )


def micro_batches(asked: argparse.Namespace) -> list[list[MicroBatch]]:
    """Return the work of each rank in packed rows."""
    return pack(work(asked), Layout(asked.budget, ranks=asked.ranks, packed=True, crossover_tokens=12_000.0))


def command(batches: list[MicroBatch]) -> Frame:
    """Return the micro-batches as the front sends them."""
    arrays = {
        name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()
    }
    return Frame("work", 0, {"idle": [batch.idle for batch in batches]}, arrays)


class Record:
    """JSON lines on the terminal and, where a folder is given, in a file of it, with tables of profiles beside it."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = folder
        self._name = name
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, **facts: Any) -> None:
        """Write one JSON object."""
        line = json.dumps(facts)
        print(line, flush=True)
        if self._folder is not None:
            with (self._folder / f"{self._name}.jsonl").open("a") as file:
                file.write(line + "\n")

    def keep(self, table: str) -> None:
        """Write a table to the folder, and its first lines to the terminal."""
        print("\n".join(line[:180] for line in table.splitlines()[:24]), flush=True)
        if self._folder is not None:
            (self._folder / f"{self._name}-profile.txt").write_text(table)
