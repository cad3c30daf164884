"""Make one update on one rank: forward and backward over its micro-batches, then a step that all ranks take or none.

Invariants: all numbers leave a micro-batch as sums, the loss as a weighted one; every decision (skip, distrust) is
made from values reduced over the gang, so all ranks decide alike; weights change in `finish` only, and only where loss
and gradient are finite; the rollouts of an update are refused only before a step has changed a weight; a step that is
not finite is skipped and named, and the other steps are kept; an error after a step was made ends this process, because
the weights then belong to no version.

The metrics of a step come from its sums over all tokens, those of an update from the metrics of its steps. A metric is
there on every rank or on none, because all ranks get the same columns; only the first step measures the difference
between generator and trainer, because that step already changes the policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flotilla_core import telemetry
from flotilla_core.errors import FlotillaError, Mismatch
from flotilla_core.telemetry import names
from flotilla_trainer.rank.device_memory import MicroBatchMemory, out_of_memory
from flotilla_trainer.rank.kept_whole import Kept, keeping, kept_by
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.objective import LossTerms, RankObjective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.settings import SessionSettings

Columns = dict[str, torch.Tensor]

ALIGNED = 16
"""Every array of a command begins at a multiple of this many bytes, whatever the size of its numbers."""

SUMS = (
    "loss",
    "tokens",
    "entropy",
    "clipped",
    "ratio",
    "correction",
    "left_out",
    "divergence",
    "teacher_divergence",
    "teacher_tokens",
    "logprob_diff",
    "probs_diff",
    "fresh",
    "fresh_probs_diff",
    "rollout_kl",
    "trainer_probs",
    "rollout_probs",
    "trainer_squares",
    "rollout_squares",
    "products",
)
MAXIMA = ("logprob_diff", "probs_diff")

FRESH_ENOUGH = 0.5
"""The least share of tokens written by the trained version with which generator and trainer are compared."""

BEFORE_ANY_STEP = (
    "logprob_diff/mean",
    "logprob_diff/max",
    "probs_diff/mean",
    "probs_diff/max",
    "probs_diff/fresh",
    "rollout_kl",
    "rollout_correlation",
    "tokens/fresh_share",
)


def micro_batches(
    command: Frame, device: torch.device, part: range | None = None
) -> Iterator[tuple[Columns, bool]]:
    """Yield the micro-batches of a command, or a part of them, as tensors, and whether each is idle work."""
    idle_ones = command.fields["idle"]
    wanted = range(len(idle_ones)) if part is None else part
    placed = _placed(
        {name: array for name, array in command.arrays.items() if int(name.partition("/")[0]) in wanted},
        device,
    )
    for index in wanted:
        prefix = f"{index}/"
        columns = {
            name.removeprefix(prefix): tensor for name, tensor in placed.items() if name.startswith(prefix)
        }
        yield columns, idle_ones[index]


def _placed(arrays: dict[str, Array], device: torch.device) -> Columns:
    """Return the arrays as tensors on the device; a GPU takes them in one copy, while the host goes on.

    Lengths stay on the host, which reads them to choose kernels: on a GPU every such read would wait for it.
    """
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    moving = {name: tensor for name, tensor in tensors.items() if not name.endswith("packed_lengths")}
    places, size = {}, 0
    for name, tensor in moving.items():
        places[name] = slice(size, size + tensor.nbytes)
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in moving.items():
        host[places[name]].view(tensor.dtype).copy_(tensor.reshape(-1))
    whole = host.to(device, non_blocking=True)
    return tensors | {
        name: whole[places[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in moving.items()
    }


def _most_tokens(command: Frame, part: range | None) -> int:
    """Return the tokens of the largest micro-batch, padding included."""
    indices = range(len(command.fields["idle"])) if part is None else part
    return max((command.arrays[f"{index}/tokens"].size for index in indices), default=0)


class Update:
    """The sums of losses and metrics of an update, and the gradients in the model."""

    def __init__(
        self,
        model: ShardedModel,
        settings: SessionSettings,
        objective: RankObjective,
        link: FrontLink,
        memory: MicroBatchMemory | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._link = link
        self._objective = objective
        self._memory = memory
        self._named: set[str] = set()
        self._factor = 1.0
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=model.device)
        self._maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=model.device)

    def accumulate(
        self, command: Frame, *, backward: bool, factor: float = 1.0, part: range | None = None
    ) -> None:
        """Run every micro-batch of this rank, or a part of them, and let their loss count `factor` times.

        One that does not fit into memory is refused: by all ranks before the pass, or by a lone rank within it.
        """
        lacking = ""
        try:
            self._all(command, backward=backward, factor=factor, part=part)
        except torch.OutOfMemoryError as error:
            if dist.get_world_size() > 1:
                raise
            lacking = str(error).partition("\n")[0]
        # Outside of the block above, which holds what the pass computed.
        if lacking:
            torch.cuda.empty_cache()
            raise out_of_memory(lacking)

    def _all(self, command: Frame, *, backward: bool, factor: float, part: range | None) -> None:
        """Run these micro-batches."""
        total = len(command.fields["idle"] if part is None else part)
        self._factor = factor
        kept = self._kept(command, part) if backward else Kept()
        with (
            telemetry.span(names.TRAINER_FORWARD_BACKWARD),
            torch.set_grad_enabled(backward),
            keeping(self._model.policy, kept) as announce,
        ):
            for index, (columns, idle) in enumerate(micro_batches(command, self._model.device, part)):
                self._link.progress(f"micro-batch {index + 1} of {total}")
                announce(index + 1 == total)
                self._one(columns, idle, backward)

    def absorb(self, other: Update) -> None:
        """Add the sums of `other` to those of this update."""
        self._named |= other._named
        self._sums += other._sums
        self._maxima = torch.maximum(self._maxima, other._maxima)

    def scale_loss(self, factor: float) -> None:
        """Multiply the loss so far by `factor`."""
        self._sums[SUMS.index("loss")] *= factor

    def reduced(self, *extra: torch.Tensor) -> tuple[dict[str, float], list[float]]:
        """Return the metrics over all tokens of all ranks, and `extra` summed over the ranks; a collective."""
        self._link.progress("reducing over the ranks")
        sums = torch.cat([self._sums, *(value.double().reshape(1) for value in extra)])
        dist.all_reduce(sums)
        dist.all_reduce(self._maxima, dist.ReduceOp.MAX)
        totals = dict(zip(SUMS, sums.tolist(), strict=False))
        peaks = dict(zip(MAXIMA, self._maxima.tolist(), strict=True))
        return objective_metrics(totals, peaks, self._named), sums[len(SUMS) :].tolist()

    def _kept(self, command: Frame, part: range | None) -> Kept:
        """Return what stays whole between the micro-batches, beside the largest of them."""
        needed = None if self._memory is None else self._memory.require(_most_tokens(command, part))
        return Kept() if self._settings.objective.compares_distributions else kept_by(self._model, needed)

    def _one(self, columns: Columns, idle: bool, backward: bool) -> None:
        terms = self._objective.on(self._model.policy, columns, self._settings.batching.logprob_chunk_tokens)
        self._named.update(terms.sums)
        if backward:
            # Idle work takes part in the collectives of the backward pass with a gradient of zero.
            (terms.loss * (0.0 if idle else self._factor)).backward()
        if not idle and self._model.mesh.counts_tokens:
            self._count(terms)

    def _count(self, terms: LossTerms) -> None:
        nothing = terms.loss.new_zeros((), dtype=torch.float64)
        sums = torch.stack([terms.sums.get(name, nothing).double() for name in SUMS])
        sums[SUMS.index("loss")] *= self._factor
        self._sums += sums
        peaks = torch.stack([terms.maxima.get(name, nothing).double() for name in MAXIMA])
        self._maxima = torch.maximum(self._maxima, peaks)


def finish(
    update: Update,
    optimizer: PolicyOptimizer,
    learning_rate: float,
    refuse_above: float | None = None,
) -> tuple[dict[str, float], str]:
    """Step or skip, the same on all ranks; return metrics, and why the step was skipped.

    Rollouts that are further from the trainer than `refuse_above` are refused with an error.
    """
    started = time.monotonic()
    with telemetry.span(names.TRAINER_OPTIMIZER_STEP):
        optimizer.complete_gradients()
        metrics, (squared_norm,) = update.reduced(optimizer.squared_norm())
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        metrics |= {"grad_norm": norm, "learning_rate": learning_rate}
        skipped = "" if math.isfinite(norm) else f"the gradient norm is {norm}"
        if not math.isfinite(metrics["loss"]):
            skipped = f"the loss is {metrics['loss']}"
        distrusted = "" if skipped else _distrust(metrics, refuse_above)
        if skipped or distrusted:
            optimizer.discard_gradients()
        else:
            optimizer.step(learning_rate, norm)
    if distrusted:
        raise Mismatch(
            distrusted,
            why="generator and trainer do not compute the same policy, or samples have log-probabilities of another",
            next_step="look at probs_diff/fresh and canary over the run, and at the dtypes and the version of the "
            "engine; for a difference that is known, raise algorithm.correction.fail_at or set it to null, and let "
            "algorithm.correction.importance make up for it",
        )
    metrics["time/optimizer_s"] = time.monotonic() - started
    return metrics, skipped


def _distrust(metrics: dict[str, float], limit: float | None) -> str:
    """Return why the rollouts are too far from the trainer to be trained on; empty where they are not."""
    mean = metrics.get("probs_diff/fresh", 0.0)
    if limit is None or mean <= limit:
        return ""
    return (
        f"the probabilities of one version differ between generator and trainer by {mean:.4g} on average, "
        f"above {limit:g}"
    )


@dataclass
class UpdateSteps:
    """Takes the optimizer steps of one update on one rank, one mini-batch after the other."""

    optimizer: PolicyOptimizer
    accumulated: Callable[[Frame, range], Update]
    """Runs forward and backward over some micro-batches of the command."""
    refuse_above: float | None = None
    """The limit of the first step: later ones learn from rollouts of a policy that they are no more."""
    _made: list[dict[str, float]] = field(default_factory=list)
    _skipped: list[dict[str, float]] = field(default_factory=list)
    _reasons: list[str] = field(default_factory=list)

    def take(self, command: Frame) -> dict[str, Any]:
        """Take all finite steps and return the answer to the command."""
        first, sizes = 0, command.fields["steps"]
        for number, size in enumerate(sizes, 1):
            place = f"step {number} of {len(sizes)}"
            try:
                self._one(command, range(first, first + size), place if len(sizes) > 1 else "")
            except FlotillaError as error:
                if self._made:
                    raise RuntimeError(f"{place} failed after others were made") from error
                raise
            first += size
        return self._answer()

    def _one(self, command: Frame, part: range, place: str) -> None:
        """Take one step or skip it."""
        started = time.monotonic()
        update = self.accumulated(command, part)
        elapsed = time.monotonic() - started
        limit = None if self._made else self.refuse_above
        metrics, skipped = finish(update, self.optimizer, command.fields["learning_rate"], limit)
        metrics["time/forward_backward_s"] = elapsed
        if skipped:
            self._skipped.append(metrics)
            self._reasons.append(f"{place}: {skipped}" if place else skipped)
        else:
            self._made.append(metrics)

    def _answer(self) -> dict[str, Any]:
        metrics = metrics_of_steps(self._made or self._skipped)
        return {
            "metrics": metrics | {"optimizer/steps": float(len(self._made))},
            "skipped": "" if self._made else "; ".join(self._reasons),
            "skipped_steps": self._reasons if self._made else [],
        }


def objective_metrics(totals: dict[str, float], peaks: dict[str, float], names: set[str]) -> dict[str, float]:
    """Return the metrics of those sums whose `names` the objective gave."""
    tokens = totals["tokens"]
    metrics = {"loss": totals["loss"], "tokens/trained": tokens}
    shares = {"entropy": "entropy", "clipped": "clip_fraction", "ratio": "ratio_mean"}
    metrics |= {said: totals[name] / tokens for name, said in shares.items() if name in names}
    if "divergence" in names:
        metrics["kl/mean"] = totals["divergence"] / tokens
    if "teacher_divergence" in names:
        # In one of several mini-batches, no token may count.
        metrics["teacher/divergence"] = totals["teacher_divergence"] / max(1.0, totals["teacher_tokens"])
    if "probs_diff" in names:
        for name, peak in peaks.items():
            metrics |= {f"{name}/mean": totals[name] / tokens, f"{name}/max": peak}
        metrics |= {
            "rollout_kl": totals["rollout_kl"] / tokens,
            "rollout_correlation": _correlation(totals),
            "correction/weight_mean": totals["correction"] / tokens,
            "correction/left_out": totals["left_out"] / tokens,
            "tokens/fresh_share": totals["fresh"] / tokens,
        }
        # An engine's border between two versions is off by a token or two, so a few fresh tokens prove nothing.
        if totals["fresh"] >= FRESH_ENOUGH * tokens:
            metrics["probs_diff/fresh"] = totals["fresh_probs_diff"] / totals["fresh"]
    return metrics


def _correlation(totals: dict[str, float]) -> float:
    """Return the correlation of the probabilities of trainer and rollout; 1 where one of them never varies."""
    tokens = totals["tokens"]
    mean_p, mean_q = totals["trainer_probs"] / tokens, totals["rollout_probs"] / tokens
    variance_p = totals["trainer_squares"] / tokens - mean_p**2
    variance_q = totals["rollout_squares"] / tokens - mean_q**2
    if not (variance_p > 0 and variance_q > 0):
        return 1.0
    return (totals["products"] / tokens - mean_p * mean_q) / math.sqrt(variance_p * variance_q)


def metrics_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sums of times and tokens over the steps, and the means of all other metrics."""
    first = steps[0]
    metrics = {}
    for name in first:
        values = [step[name] for step in steps if name in step]
        total = sum(values)
        adds_up = name == "tokens/trained" or name.startswith("time/")
        metrics[name] = total if adds_up else total / len(values)
    return metrics | {name: first[name] for name in BEFORE_ANY_STEP if name in first}
