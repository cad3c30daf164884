"""Whole updates of one trainer rank on a GPU: tokens a second, MFU, seconds of each part, peak memory.

`python bench/gpu/trainer.py` trains a Qwen3-0.6B shape on 32 prompts x 8 samples x 512 tokens, as the benches of the
whole loop do, through the rank's own model, objective, update and optimizer, without a front and without gRPC.
`--profile` adds the kernels that took longest; `--head` measures the head alone, fused and plain; `--check` compares
the fast path with plain torch operations on the same weights, in float32 and bfloat16, over ten updates. Without a GPU
all of it runs on a small shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from one_rank import GPU, finish_kernels, one_rank, settings
from qwen3_shape import QWEN3_0_6B
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from flotilla_core.config import BatchingConfig, OptimizerConfig, PolicyConfig
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.rank import fused_head
from flotilla_trainer.rank.compilation import Compilation
from flotilla_trainer.rank.fused_head import PLAIN, HeadRules, head_scores
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel, gathered
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.wire.frames import Frame
from flotilla_trainer.wire.objective import POLICY, ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings

PEAK_FLOPS = 989e12
"""Of an H200 in bfloat16, without sparsity."""
SMALL = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CHECKED_LAYERS, CHECKED_UPDATES = 4, 10
FLOAT32_LIMIT, HALF_LIMIT = 1e-4, 1.1
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, epsilon=1e-5, max_grad_norm=0)
"""The epsilon keeps AdamW from turning the rounding of tiny gradients into whole steps."""

Outcome = dict[str, dict[str, torch.Tensor]]
"""Gradients, weights and steps, each by the name of the parameter."""


class Line:
    """A front that only listens."""

    def progress(self, phase: str) -> None:
        """Nobody asks how far this rank has come."""

    def moved(self) -> None:
        """Nobody asks how far this rank has come."""


def main() -> int:
    """Measure, or compare."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--prompts", type=int, default=32 if GPU else 2)
    cli.add_argument("--samples", type=int, default=8 if GPU else 2)
    cli.add_argument("--prompt-tokens", type=int, default=100 if GPU else 7)
    cli.add_argument("--response-tokens", type=int, default=512 if GPU else 19)
    cli.add_argument("--budget", type=int, default=16_384 if GPU else 64, help="tokens of a micro-batch")
    cli.add_argument("--chunk", type=int, default=BatchingConfig().logprob_chunk_tokens)
    cli.add_argument("--updates", type=int, default=8)
    cli.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    cli.add_argument("--profile", action="store_true")
    cli.add_argument("--head", action="store_true")
    cli.add_argument("--check", action="store_true")
    asked = cli.parse_args()
    if asked.check:
        return checked(asked)
    if asked.head:
        return head_alone(asked)
    return measured(asked)


def measured(asked: argparse.Namespace) -> int:
    """Train some updates and print one line for each, and the medians."""
    with one_rank(torch.bfloat16 if GPU else torch.float32, **shape()) as (model, _):
        compilation = Compilation(asked.compile, DEVICE, Line().progress)
        assert compilation.begin(model, packed=True), compilation.refusal
        say(compiled=model.compiled_layers.on, refusal=compilation.refusal, **compilation.metrics())
        trainer = Trainer(model, session(asked.chunk))
        batches = micro_batches(asked)
        fed = sum(batch.sequence_tokens for batch in batches)
        scored = sum(len(batch.places) for batch in batches)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds: list[float] = []
        for number in range(asked.updates):
            found = trainer.update(batches)
            if number > 1:
                seconds.append(found["seconds"])
            say(update=number, **found, **compilation.metrics())
        middle = statistics.median(seconds)
        say(
            tokens=fed,
            scored_tokens=scored,
            parameters=parameters,
            micro_batches=len(batches),
            median_s=round(middle, 4),
            response_tokens_per_s=round(scored / middle),
            tokens_per_s=round(fed / middle),
            mfu=round(6 * parameters * fed / middle / PEAK_FLOPS, 4),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else None,
            graphs=counters["stats"]["unique_graphs"],
            graph_breaks=dict(counters["graph_break"]),
        )
        if asked.profile:
            profiled(lambda: trainer.update(batches))
    return 0


class Trainer:
    """The parts of a rank that make an update."""

    def __init__(self, model: ShardedModel, settings: SessionSettings) -> None:
        self._model = model
        self._settings = settings
        self._objective = Objective(settings.objective)
        self.optimizer = PolicyOptimizer(model, settings.optimizer)

    def accumulate(self, batches: list[MicroBatch]) -> Update:
        """Run forward and backward over all micro-batches."""
        update = Update(self._model, self._settings, self._objective, Line())
        update.accumulate(command(batches), backward=True)
        return update

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


def shape(**changes: Any) -> dict[str, Any]:
    """Return the shape of the model."""
    return (QWEN3_0_6B if GPU else SMALL) | {"initializer_range": 0.02 if GPU else 0.2} | changes


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
    count = asked.prompts * asked.samples
    lengths = np.full(count, asked.prompt_tokens + asked.response_tokens)
    ends = np.cumsum(lengths)
    scored = np.concatenate([np.arange(end - asked.response_tokens, end) for end in ends])
    total = len(scored)
    advantages = np.repeat(random.normal(0, 1, count), asked.response_tokens).astype(np.float32)
    return Sequences(
        random.integers(0, shape()["vocab_size"], int(lengths.sum())).astype(np.int32),
        lengths,
        scored,
        {
            # Given answers have no advantages; what counts of them is in their weights.
            "weights": advantages / np.float32(total)
            if asked.check
            else np.full(total, 1 / total, np.float32),
            "advantages": advantages,
            "rollout_logprobs": np.full(total, -np.log(shape()["vocab_size"]), np.float32),
            "fresh": np.ones(total, np.float32),
            "sequences": np.repeat(np.arange(count), asked.response_tokens).astype(np.float32),
        },
    )


def micro_batches(asked: argparse.Namespace) -> list[MicroBatch]:
    """Return the work of one rank in packed rows."""
    return pack(work(asked), Layout(asked.budget, ranks=1, packed=True, crossover_tokens=12_000.0))[0]


def command(batches: list[MicroBatch]) -> Frame:
    """Return the micro-batches as the front sends them."""
    arrays = {
        name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()
    }
    return Frame("work", 0, {"idle": [batch.idle for batch in batches]}, arrays)


def profiled(act: Callable[[], Any]) -> None:
    """Print the kernels of one call that took longest, and the time in which the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    with profile(activities=activities) as found:
        act()
    averages = found.key_averages()
    order = "self_device_time_total" if GPU else "self_cpu_time_total"
    print(averages.table(sort_by=order, row_limit=40, max_name_column_width=90))
    if GPU:
        busy = sum(event.self_device_time_total for event in averages) / 1e6
        say(profiled_kernel_s=round(busy, 4))


def head_alone(asked: argparse.Namespace) -> int:
    """Time forward and backward of the head on one micro-batch, fused and plain, and the memory that both take."""
    sizes, tokens = shape(), asked.budget
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
            seconds = []
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(6):
                finish_kernels()
                started = time.perf_counter()
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
                finish_kernels()
                seconds.append(time.perf_counter() - started)
            say(
                head=name,
                entropy_gradient=entropy_gradient,
                tokens=tokens,
                seconds=round(min(seconds), 5),
                of_an_update_s=round(min(seconds) * 131_072 / tokens, 4),
                peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else None,
            )
    fused_head.operations_on = kernels
    return 0


def checked(asked: argparse.Namespace) -> int:
    """Compare weights and gradients after ten updates on the fast path with those of plain operations."""
    asked.prompts, asked.samples, asked.budget = 2, 2, 2 * (asked.prompt_tokens + asked.response_tokens)
    asked.chunk = 64 if GPU else 5
    fast: dict[str, Outcome] = {}
    plain: dict[str, Outcome] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with one_rank(dtype, **shape(num_hidden_layers=CHECKED_LAYERS)) as (model, place):
            compilation = Compilation("on" if GPU else "off", DEVICE, Line().progress)
            assert compilation.begin(model, packed=True), compilation.refusal
            fast[name] = outcome_of_fast_path(model, asked)
            plain[name] = outcome_of_plain_path(place, dtype, asked)
    right = plain["float32"]
    paths = {"float32": fast["float32"], "bfloat16": fast["bfloat16"], "bfloat16, plain": plain["bfloat16"]}
    errors = {
        path: {kind: distance(found, right, kind) for kind in ("gradient", "weight", "step")}
        for path, found in paths.items()
    }
    for path, found in errors.items():
        say(path=path, against="float32, plain", **found)
    exact = max(errors["float32"]["gradient"], errors["float32"]["weight"])
    ratio = errors["bfloat16"]["gradient"] / errors["bfloat16, plain"]["gradient"]
    say(float32_error=exact, limit=FLOAT32_LIMIT, bfloat16_over_plain=round(ratio, 3), limit_of_it=HALF_LIMIT)
    return 0 if exact < FLOAT32_LIMIT and ratio < HALF_LIMIT else 1


def outcome_of_fast_path(model: ShardedModel, asked: argparse.Namespace) -> Outcome:
    """Return the last gradients, the weights, and how far the weights moved, of the rank's own code."""
    named = dict(model.causal_lm.named_parameters())
    first = {name: whole(parameter) for name, parameter in named.items()}
    trainer = Trainer(model, given_answers(asked.chunk))
    batches = micro_batches(asked)
    for _ in range(CHECKED_UPDATES - 1):
        trainer.update(batches)
    update = trainer.accumulate(batches)
    gradients = {name: whole(parameter.grad) for name, parameter in named.items()}
    finish(update, trainer.optimizer, OPTIMIZER.learning_rate)
    return outcome(first, gradients, {name: whole(parameter) for name, parameter in named.items()})


def outcome_of_plain_path(place: Path, dtype: torch.dtype, asked: argparse.Namespace) -> Outcome:
    """Return the same of transformers' own forward pass, log_softmax and torch's plain AdamW on float32 masters."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa")
    model.to(DEVICE).eval()
    read = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).to(DEVICE)
    masters = dict(read.named_parameters())
    first = {name: whole(master) for name, master in masters.items()}
    adamw = torch.optim.AdamW(
        masters.values(),
        lr=OPTIMIZER.learning_rate,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.epsilon,
        weight_decay=0.0,
        foreach=True,
    )
    given = work(asked)
    rows = torch.from_numpy(given.tokens).to(DEVICE).long().reshape(len(given.lengths), -1)
    weights = torch.from_numpy(given.columns["weights"]).to(DEVICE).reshape(len(rows), -1)
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(CHECKED_UPDATES):
        adamw.zero_grad(set_to_none=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        for row, weight in zip(rows, weights, strict=True):
            logits = model(input_ids=row[None, :-1], use_cache=False).logits[0, asked.prompt_tokens - 1 :]
            logprobs = torch.log_softmax(logits.float(), -1)
            (-(weight * logprobs.gather(-1, row[asked.prompt_tokens :, None]).squeeze(-1)).sum()).backward()
            for name, parameter in model.named_parameters():
                held = masters[name].grad
                masters[name].grad = parameter.grad.float() if held is None else held + parameter.grad
                parameter.grad = None
        gradients = {name: whole(master.grad) for name, master in masters.items()}
        adamw.step()
    return outcome(first, gradients, {name: whole(master) for name, master in masters.items()})


def outcome(
    first: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> Outcome:
    """Return the gradients, the weights and the steps from the first weights."""
    steps = {name: weight - first[name] for name, weight in weights.items()}
    return {"gradient": gradients, "weight": weights, "step": steps}


def distance(found: Outcome, right: Outcome, kind: str) -> float:
    """Return the largest relative distance of a tensor of this kind."""
    return max(
        float((found[kind][name] - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in right[kind].items()
    )


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of all of a tensor on the host."""
    assert tensor is not None
    return gathered(tensor.detach()).float().cpu().clone()


def say(**facts: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
