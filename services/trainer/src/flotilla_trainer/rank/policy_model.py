"""The language model as training uses it: it takes token ids and returns log-probabilities of given tokens.

Invariants: logits exist for `chunk_tokens` tokens at a time, in the forward and again in the backward pass, never for
all; hidden states and head are used inside this module's own forward, so that sharded parameters (tied ones too) are
whole when they are needed; of a reference only the hidden states of the scored tokens and one head are kept, so that
its logits, too, exist for one chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flotilla_trainer.losses.divergence import TeacherTop, full_divergence, teacher_divergence
from flotilla_trainer.rank.body_model import ROW_ATTENTION, BodyModel
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.sequence_parallel import SequenceParallel


class ReferenceStates(NamedTuple):
    """The hidden states of the reference on one micro-batch, and its head; they give logits without a gradient."""

    hidden: torch.Tensor
    """The last hidden states of the scored tokens, in their order: [scored tokens, hidden size]."""
    weight: torch.Tensor
    """The weight of the whole head."""
    bias: torch.Tensor | None

    def split(self, tokens: int) -> list[ReferenceStates]:
        """Split into parts of at most `tokens` tokens."""
        return [self._replace(hidden=hidden) for hidden in self.hidden.split(tokens)]


class TokenScores(NamedTuple):
    """The scores of tokens, one row for each."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    """The most likely tokens, [tokens, k]; k is 0 unless asked for."""
    top_logprobs: torch.Tensor
    divergence: torch.Tensor
    """The divergence from the reference over the whole vocabulary; zero where none was given."""
    squares: torch.Tensor
    """The sum of all squared probabilities; zero unless asked for."""
    teacher_divergence: torch.Tensor
    """The divergence from a teacher over the tokens that it finds likeliest; zero where none was given."""


class PolicyModel(BodyModel):
    """A causal language model with a chunked head."""

    causal_lm: PreTrainedModel

    def __init__(self, causal_lm: PreTrainedModel, lane: SequenceParallel | None = None) -> None:
        super().__init__(causal_lm, lane)
        config = causal_lm.config
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._softcap = getattr(config, "final_logit_softcapping", None)

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model inside, without weights."""
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ROW_ATTENTION
        )
        return model

    @staticmethod
    def read(folder: Path) -> tuple[PreTrainedModel, set[str]]:
        """Read the model of a folder in float32 on the host, and the names of the tensors that it lacks."""
        # The declared type returns a model only and does not cover `output_loading_info`.
        from_pretrained: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        model, report = from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ROW_ATTENTION, output_loading_info=True
        )
        return model, set(report["missing_keys"])

    def in_float32(self) -> list[nn.Module]:
        """Return no parts: all of a policy computes in the same type."""
        return []

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
        reference: ReferenceStates | None = None,
        squares: bool = False,
        teacher: TeacherTop | None = None,
    ) -> TokenScores:
        """Score `targets` where the flattened `positions` predict them."""
        asked = temperature, chunk_tokens, top_k, entropy_gradient, squares
        if self._lane is None:
            hidden = self._hidden(tokens, packed_row)[positions]
            return self._scores(hidden, targets, reference, teacher, *asked)
        part = self._lane.part(tokens, packed_row)
        own = part.own(positions)
        hidden = self._hidden_part(part)[positions[own] - part.first]
        taught = None if teacher is None else teacher.rows(own)
        mine = self._scores(hidden, targets[own], reference, taught, *asked)
        return TokenScores(*(self._lane.joined(column, own, len(positions)) for column in mine))

    def _scores(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        reference: ReferenceStates | None,
        teacher: TeacherTop | None,
        temperature: float,
        chunk_tokens: int,
        top_k: int,
        entropy_gradient: bool,
        squares: bool,
    ) -> TokenScores:
        """Score the targets of these hidden states, chunk by chunk."""
        nothing = [None] * max(1, math.ceil(len(hidden) / chunk_tokens))
        chunks = [
            checkpoint(
                self._score,
                hidden_chunk,
                target_chunk,
                reference_chunk,
                teacher_chunk,
                temperature,
                top_k,
                entropy_gradient,
                squares,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
            for hidden_chunk, target_chunk, reference_chunk, teacher_chunk in zip(
                hidden.split(chunk_tokens),
                targets.split(chunk_tokens),
                nothing if reference is None else reference.split(chunk_tokens),
                nothing if teacher is None else teacher.split(chunk_tokens),
                strict=True,
            )
        ]
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, packed_row: PackedRow | None
    ) -> torch.Tensor:
        """Return the last hidden states at the flattened `positions`; in a lane at those of this rank's part."""
        if self._lane is None:
            return self._hidden(tokens, packed_row)[positions]
        part = self._lane.part(tokens, packed_row)
        return self._hidden_part(part)[positions[part.own(positions)] - part.first]

    def head_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the largest difference between our logits and those of the model's own forward."""
        ours = self._logits(self._hidden(tokens))  # This comes first because it sets the attention for both.
        own = self.causal_lm(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
        error: torch.Tensor = (ours - own).abs().max()
        return error

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._as_given(self.causal_lm.get_output_embeddings()(hidden))

    def _reference_logits(self, reference: ReferenceStates) -> torch.Tensor:
        return self._as_given(nn.functional.linear(reference.hidden, reference.weight, reference.bias))

    def _as_given(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and cap the output of the head as the model's own forward does."""
        logits = raw.float()
        if self._multiplier != 1.0 or self._divisor != 1.0:
            logits = logits * (self._multiplier / self._divisor)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _score(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        reference: ReferenceStates | None,
        teacher: TeacherTop | None,
        temperature: float,
        top_k: int,
        entropy_gradient: bool,
        squares: bool,
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
            lengths = probabilities.square().sum(-1) if squares else torch.zeros_like(normalizer)
        distance = torch.zeros_like(logprobs)
        if reference is not None:
            distance = full_divergence(logits, self._reference_logits(reference) / temperature)
        taught = torch.zeros_like(logprobs) if teacher is None else teacher_divergence(logits, teacher)
        return TokenScores(logprobs, entropy, top.indices, top_logprobs, distance, lengths, taught)
