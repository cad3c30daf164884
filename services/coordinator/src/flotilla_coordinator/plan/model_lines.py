"""What a run trains: the model of its stack, the weights that it starts from, and adapters where these alone learn."""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.plan.adapters import AdapterFacts
from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.remarks import STARTING_WEIGHTS
from flotilla_core.config import RunConfig


def model_lines(
    config: RunConfig, model: ModelFacts, adapters: AdapterFacts | None, longest: int
) -> Iterator[Line]:
    """A sequence may have up to `longest` tokens."""
    yield (
        "model",
        _count(model.parameters, "parameters"),
        f"{model.layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocabulary_size}, "
        f"sequences up to {longest} tokens",
    )
    if config.initial_weights:
        yield STARTING_WEIGHTS, str(config.initial_weights), "initial_weights"
    else:
        how = "the stack's model as it is; initial_weights starts from others"
        yield STARTING_WEIGHTS, str(model.folder), how
    lora = config.lora
    if lora is not None and adapters is not None:
        yield (
            "trainable",
            _count(adapters.parameters, "parameters"),
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, beside {adapters.layers} linear layers "
            f"({', '.join(adapters.names)}): {adapters.parameters / model.parameters:.2%} of the model's"
            + (f"; from {lora.adapter}" if lora.adapter else ""),
        )


def _count(number: int, what: str) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{unit} {what}"
    return f"{number} {what}"
