"""A vLLM worker that also applies weights with nothing around it: the floors of every commit."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from flotilla_generator.engine.vllm.worker import WeightWorker


class ApplyingWorker(WeightWorker):
    """WeightWorker that remembers what was staged, and two measurements on it."""

    def flotilla_remember(self) -> dict[str, Any]:
        """Keep the tensors of every publication from now on until the next one."""
        return self._flotilla_guarded(_remember)

    def flotilla_apply_alone(self) -> dict[str, Any]:
        """Seconds in which vLLM loads them, and in which their bytes are copied to memory that is there already."""
        return self._flotilla_guarded(_apply_alone)


def _remember(weights: Any) -> None:
    live = weights.live
    prepare = live.prepare

    def remembering(staged: Any, seed: int) -> Any:
        live.remembered = staged
        return prepare(staged, seed)

    live.prepare = remembering
    live.copies = {}


def _apply_alone(weights: Any) -> dict[str, Any]:
    live = weights.live
    for name, tensor in live.remembered.tensors(weights._worker.device):
        if name not in live.copies:
            live.copies[name] = torch.zeros_like(tensor)
    started, cpu = time.perf_counter(), time.process_time()
    live.loader.load(live.loader.live, live.remembered)
    _wait_for_the_gpu()
    loaded, cpu_seconds = time.perf_counter(), time.process_time() - cpu
    for name, tensor in live.remembered.tensors(weights._worker.device):
        live.copies[name].copy_(tensor)
    _wait_for_the_gpu()
    return {
        "seconds": loaded - started,
        "copy_seconds": time.perf_counter() - loaded,
        "cpu_seconds": cpu_seconds,
        "pid": os.getpid(),
    }


def _wait_for_the_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
