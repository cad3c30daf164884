"""The language model as training uses it: it takes token ids and returns log-probabilities of given tokens.

Invariants: logits exist for one chunk of tokens at a time, in the forward and again in the backward pass, never for
all; hidden states and head are used inside this module's own forward, so that sharded parameters (tied ones too) are
whole when they are needed; of a reference only the hidden states of the scored tokens and one head are kept, so that
its logits, too, exist for one chunk at a time. Log-probabilities and entropies alone come from the fused head; whatever
else is asked of the logits comes from plain operations on chunks of `chunk_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flotilla_trainer.losses.divergence import TeacherTop, full_divergence, teacher_divergence
from flotilla_trainer.rank.body_model import ROW_ATTENTION, BodyModel
from flotilla_trainer.rank.fused_head import head_scores
from flotilla_trainer.rank.head_rules import HeadRules
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
        multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._rules = HeadRules(multiplier / divisor, getattr(config, "final_logit_softcapping", None))

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
            hidden = self._hidden(tokens, packed_row).index_select(0, positions)
            return self._scores(hidden, targets, reference, teacher, *asked)
        part = self._lane.part(tokens, packed_row)
        own = part.own(positions)
        hidden = self._hidden_part(part).index_select(0, positions[own] - part.first)
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
        head = self._plain_head()
        if head is not None and reference is None and teacher is None and not (top_k or squares):
            logprobs, entropy = head_scores(
                hidden,
                head.weight,
                head.bias,
                targets,
                rules=self._at(temperature),
                chunk_tokens=chunk_tokens,
                entropy_gradient=entropy_gradient,
                moved=self._moved,
            )
            nothing, none = torch.zeros_like(logprobs), logprobs.new_empty(len(logprobs), 0)
            return TokenScores(logprobs, entropy, none.long(), none, nothing, nothing, nothing)
        empty = [None] * max(1, math.ceil(len(hidden) / chunk_tokens))
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
                empty if reference is None else reference.split(chunk_tokens),
                empty if teacher is None else teacher.split(chunk_tokens),
                strict=True,
            )
        ]
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, packed_row: PackedRow | None
    ) -> torch.Tensor:
        """Return the last hidden states at the flattened `positions`; in a lane at those of this rank's part."""
        if self._lane is None:
            return self._hidden(tokens, packed_row).index_select(0, positions)
        part = self._lane.part(tokens, packed_row)
        return self._hidden_part(part).index_select(0, positions[part.own(positions)] - part.first)

    def head_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the largest difference between our logits and those of the model's own forward."""
        ours = self._logits(self._hidden(tokens))  # This comes first because it sets the attention for both.
        own = self.causal_lm(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
        error: torch.Tensor = (ours - own).abs().max()
        return error

    def _plain_head(self) -> nn.Linear | None:
        """Return the head where it is a linear layer and nothing more; adapters make it more."""
        head = self.causal_lm.get_output_embeddings()
        if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
            return None
        return head

    def _logits(self, hidden: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Scale and cap the output of the head as the model's own forward does, at a temperature."""
        return self._at(temperature).logits(self.causal_lm.get_output_embeddings()(hidden))

    def _reference_logits(self, reference: ReferenceStates, temperature: float) -> torch.Tensor:
        raw = nn.functional.linear(reference.hidden, reference.weight, reference.bias)
        return self._at(temperature).logits(raw)

    def _at(self, temperature: float) -> HeadRules:
        return replace(self._rules, temperature=temperature)

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
        logits = self._logits(hidden, temperature)
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
            distance = full_divergence(logits, self._reference_logits(reference, temperature))
        taught = torch.zeros_like(logprobs) if teacher is None else teacher_divergence(logits, teacher)
        return TokenScores(logprobs, entropy, top.indices, top_logprobs, distance, lengths, taught)
