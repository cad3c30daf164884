"""Wrong weights in the memory that a generator decodes with, put there after their digests agreed.

A bench (`gpu/caught.py`, `gpu/stall.py`) extends `WrongWorker`, names it as the worker extension of its engine, and
asks its workers for a fault. A whole replica can do so to itself:

    FLOTILLA_WRONG_WEIGHTS=stale_head:2 python bench/wrong_weights.py --name generator-9 --stack stack.yaml

has one with a stale head from its second commit on. Invariants: memory that graphs were captured with is written in
place; packed matrices of CPUs, which cannot be written, are replaced by the packed ones of another layer or of an
earlier version, or their products are changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_core.service import run_service
from flotilla_generator.engine.vllm.weight_check import matrix_layers
from flotilla_generator.engine.vllm.worker import WeightWorker

WRONG_WEIGHTS = "FLOTILLA_WRONG_WEIGHTS"
KERNEL = "cpu_linear"
SCALE = 1.01
Kernel = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Kept:
    """What a matrix held at some time."""

    weight: torch.Tensor
    kernel: Kernel | None


class WrongWorker(WeightWorker):
    """WeightWorker whose live weights can be made wrong."""

    def flotilla_remember(self) -> dict[str, Any]:
        """Keep what is live now; what is stale later is this."""
        return self._flotilla_guarded(lambda weights: vars(weights).update(kept=_kept(_model(weights))))

    def flotilla_make_wrong(self, fault: str, rank: int = 0) -> dict[str, Any]:
        """Bring one of `FAULTS` into the live memory of one worker."""

        def make_wrong(weights: Any) -> None:
            if weights._worker.rank == rank:
                with torch.no_grad():
                    FAULTS[fault](_model(weights), vars(weights).get("kept", {}))

        return self._flotilla_guarded(make_wrong)

    def flotilla_apply(self) -> dict[str, Any]:
        """Commit; where the environment says so, become wrong then."""
        asked = os.environ.get(WRONG_WEIGHTS, "")
        if not asked:
            return super().flotilla_apply()
        fault, _, since = asked.partition(":")
        done: int = getattr(self, "_commits", 0) + 1
        self._commits = done
        if done == int(since):
            self.flotilla_remember()
        answer = super().flotilla_apply()
        if done >= int(since) and not answer["error"]:
            answer = answer | {"error": self.flotilla_make_wrong(fault)["error"]}
        return answer


def swapped_layers(model: Any, _kept_before: dict[str, Kept]) -> None:
    """Exchange the matrices of the first and the last layer."""
    layers = model.model.layers
    first, last = dict(matrix_layers(layers[0])), dict(matrix_layers(layers[len(layers) - 1]))
    kept = {name: _of(layer) for name, layer in first.items()}
    for name, layer in first.items():
        _put(layer, _of(last[name]))
        _put(last[name], kept[name])


def stale_head(model: Any, kept: dict[str, Kept]) -> None:
    """Give the head what it had before; one that is tied to the embeddings gets memory of its own for that."""
    for name, layer in matrix_layers(model):
        if "head" in name:
            if KERNEL not in vars(layer):
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            _put(layer, kept[name])


def stale_shard(model: Any, kept: dict[str, Kept]) -> None:
    """Give every second half of the rows of each matrix what it had before, as if one rank had sent nothing."""
    for name, layer in matrix_layers(model):
        if KERNEL in vars(layer):
            layer.cpu_linear = _second_half_of(kept[name].kernel, layer.cpu_linear)
        if layer.weight.numel():
            half = len(layer.weight) // 2
            layer.weight.data[half:] = kept[name].weight[half:]


def scaled(model: Any, _kept_before: dict[str, Kept]) -> None:
    """Multiply one matrix in the middle of the model by a little more than one."""
    layers = model.model.layers
    _, layer = matrix_layers(layers[len(layers) // 2])[-1]
    if KERNEL in vars(layer):
        kernel: Kernel = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: SCALE * kernel(x, weight, bias)
    else:
        layer.weight.data.mul_(SCALE)


FAULTS = {fault.__name__: fault for fault in (swapped_layers, stale_head, stale_shard, scaled)}


def _model(weights: Any) -> Any:
    return weights._worker.model_runner.get_model()


def _kept(model: Any) -> dict[str, Kept]:
    return {name: _of(layer) for name, layer in matrix_layers(model)}


def _of(layer: Any) -> Kept:
    return Kept(layer.weight.detach().clone(), vars(layer).get(KERNEL))


def _put(layer: Any, kept: Kept) -> None:
    if layer.weight.numel():
        layer.weight.data.copy_(kept.weight)
    if kept.kernel is not None:
        layer.cpu_linear = kept.kernel


def _second_half_of(stale: Kernel | None, kernel: Kernel) -> Kernel:
    assert stale is not None, "a packed matrix was packed before"

    def mixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made, before = kernel(x, weight, bias), stale(x, weight, bias)
        half = made.shape[-1] // 2
        return torch.cat([made[..., :half], before[..., half:]], dim=-1)

    return mixed


def main() -> None:
    """Run one replica until SIGTERM."""
    from flotilla_generator import service
    from flotilla_generator.engine.vllm import engine

    sys.path.insert(0, str(Path(__file__).parent))  # the engine's process finds this module by its name
    engine.VllmEngine = partial(engine.VllmEngine, worker_extension="wrong_weights.WrongWorker")  # type: ignore[misc, assignment]
    sys.exit(run_service(SERVICE_KIND_GENERATOR, service.GeneratorHostService))


if __name__ == "__main__":
    main()
