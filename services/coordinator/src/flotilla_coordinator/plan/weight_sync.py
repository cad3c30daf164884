"""What a sync sends, and where a generator worker keeps it.

Invariant: live and staged weights lie in a worker side by side; with adapters only they are sent, after one sending of
the weights under them to each weight group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flotilla_coordinator.plan.adapters import AdapterFacts
from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.sizes import shown_bytes
from flotilla_coordinator.plan.trainer_memory import BYTES, MASTER
from flotilla_core.config import RunConfig, StackConfig


def sync_lines(
    config: RunConfig, stack: StackConfig, model: ModelFacts, adapters: AdapterFacts | None
) -> Iterator[Line]:
    """Memory of a worker, then bytes and broadcasts of a sync."""
    generator = stack.generator
    weights = model.parameters * BYTES[generator.dtype] // generator.tensor_parallel_size
    token = model.layers * model.key_value_size * BYTES[generator.dtype] // generator.tensor_parallel_size
    sent = model.parameters * BYTES[stack.trainer.dtype]
    staged = f"live and staged {generator.dtype} weights {shown_bytes(weights)} each"
    if adapters is not None:
        staged = f"live {generator.dtype} weights, and {shown_bytes(sent)} of the host for those under the adapters"
    yield (
        "memory of a generator worker",
        f"about {shown_bytes(weights if adapters else 2 * weights)} + KV cache",
        f"{staged}; the KV cache takes {shown_bytes(token)} a token",
    )
    bucket = config.weights.bucket_mib
    moved = sent if adapters is None else adapters.parameters * MASTER
    once = "" if adapters is None else f"; {shown_bytes(sent)} before the first ones of each weight group"
    yield (
        "weight sync",
        shown_bytes(moved),
        f"in about {math.ceil(moved / (bucket << 20))} broadcast(s) of at most {bucket} MiB "
        f"to each generator{once}",
    )
