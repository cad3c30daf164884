"""The language model as training sees it: token ids in, log-probabilities of given tokens out.

Invariants: logits exist for `chunk_tokens` tokens at a time, in the forward and again in the backward pass, never for
all; hidden states and head are used inside this module's own forward, so that sharded parameters (tied ones too) are
whole when they are needed; no dropout, because rollouts and training must agree. Tokens come as rows padded on the
right, where a causal model cannot see it, or as one packed row with its borders; either way no mask is built.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flotilla_trainer.rank.packed_attention import PACKED_ATTENTION
from flotilla_trainer.rank.packed_row import PackedRow

ROW_ATTENTION = "sdpa"


class TokenScores(NamedTuple):
    """One row a scored token."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    """[tokens, k] most likely tokens; k is 0 unless asked for."""
    top_logprobs: torch.Tensor


class PolicyModel(nn.Module):
    """A causal language model with a chunked head."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        config = causal_lm.config
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.eval()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        top_k: int = 0,
        packed_row: PackedRow | None = None,
        entropy_gradient: bool = False,
    ) -> TokenScores:
        """Score `targets` where the flattened `positions` predict them."""
        hidden = self._hidden(tokens, packed_row)[positions]
        chunks = [
            checkpoint(
                self._score,
                hidden_chunk,
                target_chunk,
                temperature,
                top_k,
                entropy_gradient,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
            for hidden_chunk, target_chunk in zip(
                hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True
            )
        ]
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def head_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """Largest difference between our logits and those of the model's own forward."""
        own = self.causal_lm(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
        return (self._logits(self._hidden(tokens)) - own).abs().max()

    def packing_errors(self, first: torch.Tensor, other: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """What packing does to `last`, as shares of its largest hidden state.

        How much it differs from `last` alone in a row, and how much it depends on which sequence lies before it.
        """
        row = PackedRow.of((len(first), len(last)), last.device)
        alone = self._hidden(last[None])
        after = [
            self._hidden(torch.cat([before, last])[None], row)[len(first) :] for before in (first, other)
        ]
        differences = torch.stack([(after[0] - alone).abs().max(), (after[0] - after[1]).abs().max()])
        return differences.float() / alone.abs().max()

    def _hidden(self, tokens: torch.Tensor, packed_row: PackedRow | None = None) -> torch.Tensor:
        attention, borders = ROW_ATTENTION, {}
        if packed_row is not None:
            attention = PACKED_ATTENTION
            borders = {"position_ids": packed_row.position_ids, "packed_row": packed_row}
        if self.causal_lm.config._attn_implementation != attention:
            self.causal_lm.set_attn_implementation(attention)
        output = self.causal_lm.base_model(input_ids=tokens, use_cache=False, **borders)
        return output.last_hidden_state.flatten(0, 1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.causal_lm.get_output_embeddings()(hidden).float()
        if self._multiplier != 1.0 or self._divisor != 1.0:
            logits = logits * (self._multiplier / self._divisor)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _score(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        top_k: int,
        entropy_gradient: bool,
    ) -> TokenScores:
        logits = self._logits(hidden)
        if temperature != 1.0:
            logits = logits / temperature
        normalizer = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities = torch.softmax(logits, dim=-1)
            entropy = normalizer - (probabilities * logits).sum(-1)
        with torch.no_grad():
            top = logits.topk(top_k, dim=-1)
            top_logprobs = top.values - normalizer[:, None]
        return TokenScores(logprobs, entropy, top.indices, top_logprobs)
