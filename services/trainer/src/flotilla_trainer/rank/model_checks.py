"""Check by running a model whether it may get packed rows, or rows in parts.

Invariants: a model passes only if the hidden states of a packed sequence equal those of the same sequence alone in a
row, and do not depend on its neighbour. Those of a part must equal those in the whole row. Anything that carries
information across a border fails (a recurrent state, a convolution, a mask that a layer builds itself, positions that
do not restart).
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.body_model import BodyModel

FOLLOWS_THE_LONGEST = ("dynamic", "longrope")
"""The rotary embeddings whose frequencies depend on the longest position that a rank sees."""

OFF_BY = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The tolerance against plain rows, whose kernels may round differently."""
LEAKED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""The tolerance between two packed rows: dense layers give the same bits, experts may regroup their tokens."""
LAST_TOKENS = 7


def check_sequence_parallel(policy: BodyModel, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse, on all ranks together, a model whose rows the `width` ranks of a lane cannot share."""
    if width == 1:
        return
    why = _refusal(policy, width, dtype, device)
    if why:
        raise FailedPrecondition(
            f"{width} ranks cannot share a row of {type(policy.causal_lm).__name__}",
            where="trainer.sequence_parallel",
            why=why,
            next_step="set trainer.sequence_parallel to 1, or to a divisor of the heads",
        )


def _refusal(policy: BodyModel, width: int, dtype: torch.dtype, device: torch.device) -> str:
    config = policy.causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    if heads % width:
        return (
            f"it has {heads} attention heads = {heads // width} x {width} + {heads % width}: "
            "each rank takes as many heads as the others"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotary in FOLLOWS_THE_LONGEST:
        return f"its positions are embedded by {rotary!r}, which looks at the whole row"
    if refusal := packing_refusal(policy, dtype, device):
        return refusal
    # Two sequences, the border within a part, and a length that no width divides.
    tokens = torch.arange(8 * width - 1, device=device) % config.vocab_size
    with torch.no_grad():
        error = policy.lane_error(tokens)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if not float(error) <= OFF_BY[dtype]:
        return f"its hidden states are others in a part of a row (off by {float(error):.2g} of the largest)"
    return ""


def packing_refusal(policy: BodyModel, dtype: torch.dtype, device: torch.device) -> str:
    """Return why this model cannot be trained on packed rows; empty where it can. A collective."""
    causal_lm = policy.causal_lm
    name = type(causal_lm).__name__
    if any(isinstance(part, PreTrainedModel) and part._is_stateful for part in causal_lm.modules()):
        return f"{name} carries a state beyond attention from token to token"
    parameters = inspect.signature(causal_lm.base_model.forward).parameters.values()
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not (causal_lm._can_set_attn_implementation() and takes_more):
        return f"{name} does not let its attention be replaced"
    last = torch.arange(LAST_TOKENS, device=device) % causal_lm.config.vocab_size
    first = last[1:]
    with torch.no_grad():
        off_by, leaked = policy.packing_errors(first, first.flip(0), last).tolist()
    if not leaked <= LEAKED[dtype]:
        return f"{name} lets a sequence see its neighbour in a packed row ({leaked:.2g} of its largest hidden state)"
    if not off_by <= OFF_BY[dtype]:
        return f"{name} computes other hidden states in a packed row (off by {off_by:.2g} of the largest)"
    return ""
