"""A vLLM worker that also applies staged weights with nothing around it: the floor of every commit."""

from __future__ import annotations

import os
import time
from typing import Any

from flotilla_generator.engine.vllm.worker import WeightWorker


class ApplyingWorker(WeightWorker):
    """WeightWorker with one measurement."""

    def flotilla_apply_alone(self) -> dict[str, Any]:
        """Seconds in which vLLM loads what is staged; it stays staged."""
        return self._flotilla_guarded(_apply_alone)


def _apply_alone(weights: Any) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    worker, live = weights._worker, weights._live
    started, cpu = time.perf_counter(), time.process_time()
    with set_current_vllm_config(worker.vllm_config):
        live._load(worker.model_runner.get_model(), weights._inbox.staged)
    live._synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "pid": os.getpid()}
