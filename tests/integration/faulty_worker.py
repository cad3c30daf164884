"""A vLLM worker extension whose repair of tied heads, and whose work beside decoding, can be switched off."""

from __future__ import annotations

from typing import Any

from flotilla_generator.engine.vllm.worker import WeightWorker


class FaultyWorker(WeightWorker):
    """WeightWorker with one deliberate defect, and a switch."""

    def flotilla_leave_tied_heads_stale(self, stale: bool) -> dict[str, Any]:
        """Keep the packed copy of a tied head as it was, or repair it again."""
        return self._flotilla_guarded(lambda weights: _set_stale(weights, stale))

    def flotilla_load_in_place(self, in_place: bool) -> dict[str, Any]:
        """Load while decoding stands still, as on a GPU, or beside it again."""
        return self._flotilla_guarded(lambda weights: setattr(weights.live, "has_twins", not in_place))


def _set_stale(weights: Any, stale: bool) -> None:
    if stale:
        weights.live.loader.repair_tied_layers = lambda _model, _recorded: None
    else:
        del weights.live.loader.repair_tied_layers
