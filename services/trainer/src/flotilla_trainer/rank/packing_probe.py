"""Whether a model may get packed rows: asked of the model itself, because only its numbers can tell.

Invariant: a model passes only if the hidden states of a sequence are those that it has alone in a row and do not depend
on its neighbour; whatever carries something across the border (a recurrent state, a convolution, a mask that a layer
builds itself, positions that do not restart) shows here.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from flotilla_trainer.rank.body_model import BodyModel

OFF_BY = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Other kernels may round differently than those for rows."""
LEAKED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""The same kernels on the same shapes: dense layers give the same bits, experts may regroup their tokens."""
LAST_TOKENS = 7


def packing_refusal(policy: BodyModel, dtype: torch.dtype, device: torch.device) -> str:
    """Why this model cannot be trained on packed rows, empty where it can; a collective."""
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
