"""Whether a model may be fed in parts: asked of the model itself, as with packed rows.

Invariant: a model passes only if the hidden states of a part are those that it has in the whole row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.packing_probe import OFF_BY, packing_refusal
from flotilla_trainer.rank.sharded_model import ShardedModel

FOLLOWS_THE_LONGEST = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position that a rank sees."""


def check_lane(model: ShardedModel) -> None:
    """Refuse, on all ranks together, a model whose rows cannot be shared by the ranks of a lane."""
    width = model.mesh.width
    if width == 1:
        return
    why = _refusal(model, width)
    if why:
        raise FailedPrecondition(
            f"{width} ranks cannot share a row of {type(model.causal_lm).__name__}",
            where="trainer.sequence_parallel",
            why=why,
            next_step="set trainer.sequence_parallel to 1, or to a divisor of the heads",
        )


def _refusal(model: ShardedModel, width: int) -> str:
    config = model.causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    if heads % width:
        return (
            f"it has {heads} attention heads = {heads // width} x {width} + {heads % width}: "
            "each rank takes as many heads as the others"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotary in FOLLOWS_THE_LONGEST:
        return f"its positions are embedded by {rotary!r}, which looks at the whole row"
    if refusal := packing_refusal(model.policy, model.dtype, model.device):
        return refusal
    # Two sequences, the border within a part, and a length that no width divides.
    tokens = torch.arange(8 * width - 1, device=model.device) % config.vocab_size
    with torch.no_grad():
        error = model.policy.lane_error(tokens)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if not float(error) <= OFF_BY[model.dtype]:
        return f"its hidden states are others in a part of a row (off by {float(error):.2g} of the largest)"
    return ""
