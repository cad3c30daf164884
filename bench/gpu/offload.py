"""Weights and gradients in host memory (`trainer.cpu_offload`): is training the same, what does it save and cost.

    python bench/gpu/offload.py [--shape 0.6b|8b|small] [--layers N] [--updates 5] [--compile auto|on|off]
                                [--recompute off|selective|layers] [--limit-s 280] [--out DIR]

One GPU. From the same drawn weights it trains the Qwen3-0.6B shape four times: twice with all on the GPU, whose
distance is the chance in the order of sums, and twice with weights and gradients on the host. The first of these keeps
what the GPU has room for through an update, as the trainer does; the second keeps nothing, so that every micro-batch
moves all weights and gradients. Each prints its peak memory on the GPU and on the host, and seconds an update.

It fails where a loss, a gradient norm, or the weights after all updates differ by more than the bars below. It fails,
too, where the model on the host, given the weights of the other one, would publish other digests.

`--shape 8b` trains on the host only: its state takes 122 GiB, of which a GPU has 80. The host needs about 150 GiB,
because torch pins blocks of powers of two; `--layers 24` (5.9 billion parameters, 88 GiB of state) needs 105 GiB.
Without a GPU all of it runs on a small shape. The bench ends within `--limit-s`, whatever hangs.
"""

from __future__ import annotations

import argparse
import gc
import signal
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from one_rank import GPU
from trainer import drawn_model
from trainer_work import OPTIMIZER, SHAPES, WORK, Line, Record, Trainer, micro_batches, session

from flotilla_core.config import BatchingConfig
from flotilla_trainer.batch.packing import MicroBatch
from flotilla_trainer.rank import update as rank_update
from flotilla_trainer.rank.compilation import Compilation
from flotilla_trainer.rank.cut import local
from flotilla_trainer.rank.kept_whole import Kept, kept_by
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_weights.digest import tensor_digests

GIB = 1 << 30
BARS = {"loss": 1e-3, "grad_norm": 1e-2, "weights": 1e-2}
"""The most relative difference, of weights to the way that they went; where the order of sums alone makes more than
half of it on this GPU, twice that."""
BUCKET_TENSORS = 24
RESIDENT, AGAIN, HOST, NOTHING_KEPT = "resident", "resident again", "host", "host, nothing kept"

Weights = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """What one way to train made of the weights."""

    made: list[dict[str, Any]] = field(default_factory=list)
    """What each update answered."""
    first: Weights = field(default_factory=dict)
    last: Weights = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    """Those of what it would publish: of its last weights, or of given ones."""


def main() -> int:
    """Train in all ways, and compare."""
    asked = _asked()
    signal.alarm(int(asked.limit_s))
    record = Record(asked.out, f"offload-{asked.shape}")
    packed = micro_batches(asked)[0]
    if asked.shape == "8b":
        _trained(asked, record, packed, HOST)
        return 0
    right = _trained(asked, record, packed, RESIDENT)
    chance = _differences(right, _trained(asked, record, packed, AGAIN))
    good = True
    for way in (HOST, NOTHING_KEPT):
        found = _trained(asked, record, packed, way, given=right.last)
        bars = {name: max(bar, 2 * chance[name]) for name, bar in BARS.items()}
        apart = _differences(right, found)
        same = found.digests == right.digests
        good = good and same and all(apart[name] <= bar for name, bar in bars.items())
        record.say(way=way, apart=apart, by_chance=chance, bars=bars, same_digests=same)
    record.say(passed=good)
    return 0 if good else 1


def _asked() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=tuple(SHAPES), default="0.6b" if GPU else "small")
    cli.add_argument("--layers", type=int, help="layers of the shape, in place of its own number")
    cli.add_argument("--updates", type=int, default=5)
    cli.add_argument("--prompts", type=int)
    cli.add_argument("--budget", type=int, help="tokens of a micro-batch")
    cli.add_argument("--chunk", type=int, default=BatchingConfig().logprob_chunk_tokens)
    cli.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    cli.add_argument("--recompute", choices=("off", "selective", "layers"))
    cli.add_argument("--limit-s", type=float, default=280.0, help="the most seconds that the bench may take")
    cli.add_argument("--out", type=Path, help="a folder for JSON lines")
    asked = cli.parse_args()
    asked.ranks, asked.check = 1, False
    asked.recompute = asked.recompute or ("layers" if asked.shape == "8b" else "off")
    if asked.layers:
        SHAPES[asked.shape] = SHAPES[asked.shape] | {"num_hidden_layers": asked.layers}
    for key, value in WORK[asked.shape].items():
        if getattr(asked, key, None) is None:
            setattr(asked, key, value)
    return asked


def _trained(
    asked: argparse.Namespace,
    record: Record,
    packed: list[MicroBatch],
    way: str,
    given: Weights | None = None,
) -> Outcome:
    """Make the updates in one way; take the digests of the given weights, or else of those that came out."""
    rank_update.kept_by = (lambda model, needed: Kept()) if way == NOTHING_KEPT else kept_by
    found, compares = Outcome(), asked.shape != "8b"
    with drawn_model(asked, 0, cpu_offload=way in (HOST, NOTHING_KEPT)) as model:
        compilation = Compilation(asked.compile, model.device, Line().progress)
        assert compilation.begin(model, packed=True), compilation.refusal
        model.recomputed_layers.on = asked.recompute == "layers"
        model.selective_layers.on = asked.recompute == "selective"
        clipped = OPTIMIZER.model_copy(update={"max_grad_norm": 1.0})
        trainer = Trainer(model, replace(session(asked.chunk), optimizer=clipped))
        if compares:
            found.first = _weights(model)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        for number in range(asked.updates):
            found.made.append(trainer.update(packed))
            record.say(way=way, update=number, **found.made[-1])
        _say_costs(record, way, model, packed, found.made)
        if compares:
            found.last = _weights(model)
            if given is not None:
                _put(model, given)
            found.digests = _published(model)
        del trainer, model
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    return found


def _say_costs(
    record: Record, way: str, model: ShardedModel, packed: list[MicroBatch], made: list[dict[str, Any]]
) -> None:
    """Say what a way to train takes of both memories, and of time after the first update."""
    timed = made[1:] or made
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fed = sum(batch.sequence_tokens for batch in packed)
    middle = {
        name: statistics.median(one[name] for one in timed)
        for name in ("seconds", "forward_backward_s", "optimizer_s")
    }
    record.say(
        way=way,
        device=torch.cuda.get_device_name() if GPU else "cpu",
        torch=torch.__version__,
        parameters=parameters,
        state_gib=round(parameters * 16 / GIB, 2),
        tokens=fed,
        micro_batches=len(packed),
        **middle,
        tokens_per_s=round(fed / middle["seconds"]),
        gpu_peak_gib=round(torch.cuda.max_memory_allocated() / GIB, 2) if GPU else None,
        pinned_peak_gib=round(torch.cuda.host_memory_stats()["allocated_bytes.peak"] / GIB, 2)
        if GPU
        else None,
        host_resident_gib=round(_resident_bytes() / GIB, 2),
        threads=torch.get_num_threads(),
    )


def _resident_bytes() -> int:
    """Return the resident memory of this process; the driver's pinned pages may not be part of it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _weights(model: ShardedModel) -> Weights:
    """Return a copy of the only rank's weights on the host."""
    return {
        name: local(parameter.detach()).to("cpu", copy=True)
        for name, parameter in model.causal_lm.named_parameters()
    }


def _put(model: ShardedModel, given: Weights) -> None:
    with torch.no_grad():
        for name, parameter in model.causal_lm.named_parameters():
            local(parameter).copy_(given[name])


def _published(model: ShardedModel) -> list[int]:
    """Return the digests of the tensors that generators would get, gathered as a publication gathers them."""
    names = [name for name, _, _ in model.specs(model.dtype)]
    groups = [names[first : first + BUCKET_TENSORS] for first in range(0, len(names), BUCKET_TENSORS)]
    digests = []
    for _, rows in model.rows_to_round(groups, model.dtype):
        digests += tensor_digests([torch.cat(rows).to(model.dtype)])
    return digests


def _differences(right: Outcome, found: Outcome) -> dict[str, float]:
    """Return the largest differences of losses and norms, and that of weights to the way that they went.

    They are relative to the largest of their kind: a loss of these updates comes close to zero.
    """
    apart: dict[str, float] = {
        name: max(abs(mine[name] - theirs[name]) for mine, theirs in zip(found.made, right.made, strict=True))
        / max(abs(theirs[name]) for theirs in right.made)
        for name in ("loss", "grad_norm")
    }
    pairs = [(found.last[name], last, right.first[name]) for name, last in right.last.items()]
    moved = sum(float((last - first).double().square().sum()) for _, last, first in pairs)
    off = sum(float((mine - last).double().square().sum()) for mine, last, _ in pairs)
    return {**apart, "weights": (off / max(moved, 1e-60)) ** 0.5}


if __name__ == "__main__":
    sys.exit(main())
