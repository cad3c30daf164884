"""The occupancy of vLLM's scheduler, from its own statistics after every step."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Occupancy(StatLoggerBase):
    """The newest of what one engine said."""

    def __init__(self) -> None:
        self.waiting_samples = 0

    def record(self, scheduler_stats: Any, *_others: Any, **_more: Any) -> None:
        """Record the statistics of a step (vLLM calls this); some steps have none of the scheduler."""
        if scheduler_stats is not None:
            self.waiting_samples = scheduler_stats.num_waiting_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to add: the service says itself when it is ready."""
