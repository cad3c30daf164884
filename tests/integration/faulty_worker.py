"""A vLLM worker extension whose repair of tied heads can be switched off."""

from __future__ import annotations

from typing import Any

from flotilla_generator.engine.vllm.worker import WeightWorker


class FaultyWorker(WeightWorker):
    """WeightWorker with one deliberate defect."""

    def flotilla_leave_tied_heads_stale(self, stale: bool) -> dict[str, Any]:
        """Keep the packed copy of a tied head as it was, or repair it again."""
        return self._flotilla_guarded(lambda weights: _set_stale(weights, stale))


def _set_stale(weights: Any, stale: bool) -> None:
    if stale:
        weights._live.repair_tied_layers = lambda _model, _recorded: None
    else:
        del weights._live.repair_tied_layers
