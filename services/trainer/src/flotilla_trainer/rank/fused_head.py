"""Log-probabilities and entropies of target tokens, from hidden states and the weight of a linear head, in one piece.

Invariants: the raw output of the head exists for one chunk of tokens at a time, in the type that the model computes in;
the backward pass computes it again, except that of the last chunk, which is still there when it begins, and writes the
gradient over it. Where a GPU has plenty of memory, chunks are larger, and with one chunk nothing is computed again. The
gradient of the weight adds up over the chunks in float32. On GPUs Triton kernels read and write the raw output once
each; elsewhere plain operations compute the same in float32. Where the output is rounded, the logits of targets are
computed once more in float32, for the log-probabilities that are returned; gradients are those of the rounded output.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from flotilla_trainer.rank.device_memory import free_bytes
from flotilla_trainer.rank.head_rules import HeadRules, TargetScores

logger = logging.getLogger(__name__)

TARGETS_AT_ONCE = 4096
"""The tokens whose hidden states and rows of the weight are widened at once."""
KERNEL_CHUNKS = 4
"""The kernels take this many chunks at once: they hold 2 or 4 bytes a logit, where plain operations hold 16."""
SPARE_SHARE = 0.4
"""The share that the raw output of a chunk may take of the memory that the backward pass of the head leaves free."""


class HeadOperations(NamedTuple):
    """The two passes over the raw output of the head."""

    score_rows: Callable[[torch.Tensor, torch.Tensor, HeadRules], TargetScores]
    """The pass that scores one target in each row."""
    write_gradients: Callable[..., torch.Tensor]
    """The pass that returns the gradient by the raw numbers; it takes their place."""


def _score_rows(raw: torch.Tensor, targets: torch.Tensor, rules: HeadRules) -> TargetScores:
    """Score one target in each row."""
    logits = rules.logits(raw)
    normalizers = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normalizers
    entropies = normalizers - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return TargetScores(logprobs, normalizers, entropies)


def _write_gradients(
    raw: torch.Tensor,
    targets: torch.Tensor,
    scores: TargetScores,
    logprob_gradients: torch.Tensor,
    entropy_gradients: torch.Tensor | None,
    rules: HeadRules,
) -> torch.Tensor:
    """Return the gradient by the raw numbers; it takes their place."""
    logits = rules.logits(raw)
    distances = logits - scores.normalizers[:, None]
    pull = logprob_gradients[:, None]
    if entropy_gradients is not None:
        pull = pull + entropy_gradients[:, None] * (distances + scores.entropies[:, None])
    slopes = distances.exp_().mul_(pull).neg_()
    slopes.scatter_add_(-1, targets[:, None], logprob_gradients[:, None])
    if rules.softcap:
        steepness = logits * (rules.temperature / rules.softcap)
        slopes *= 1.0 - steepness.square()
    return raw.copy_(slopes.mul_(rules.scale / rules.temperature))


PLAIN = HeadOperations(_score_rows, _write_gradients)


def operations_on(device: torch.device) -> HeadOperations:
    """Return the kernels where they work, and plain operations elsewhere."""
    return _kernels(device) if device.type == "cuda" else PLAIN


@functools.cache
def _kernels(device: torch.device) -> HeadOperations:
    """Return the kernels if a first run of them works."""
    try:
        from flotilla_trainer.rank import head_kernels

        raw, targets = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.long, device=device)
        kernels = HeadOperations(head_kernels.score_rows, head_kernels.write_gradients)
        kernels.score_rows(raw, targets, HeadRules())
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning(
            "The head computes without kernels, which is slower: %s: %s", type(error).__name__, error
        )
        return PLAIN
    return kernels


@dataclass(frozen=True)
class HeadWork:
    """The rules and limits for the scores of one micro-batch."""

    rules: HeadRules
    chunk_tokens: int
    """The most tokens whose raw output plain operations may hold at once."""
    entropy_gradient: bool
    learns: bool
    """True where a backward pass may follow."""
    moved: Callable[[], None]
    """Called after every chunk, forward and backward."""


def head_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    rules: HeadRules,
    chunk_tokens: int,
    entropy_gradient: bool,
    moved: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target and the entropy of its distribution.

    Only an entropy that `entropy_gradient` asks for carries a gradient. After every chunk `moved` is called, in the
    forward and in the backward pass.
    """
    learns = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    work = HeadWork(rules, chunk_tokens, entropy_gradient, learns, moved)
    logprobs, entropies = _HeadScores.apply(hidden, weight, bias, targets, work)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _HeadScores(torch.autograd.Function):
    """Scores targets chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: HeadWork,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operations = operations_on(hidden.device)
        scores = TargetScores(
            *(hidden.new_empty(len(hidden), dtype=torch.float32) for _ in TargetScores._fields)
        )
        raw = None
        chunks = _chunks(len(hidden), _most_tokens(hidden, weight, work, operations))
        for chunk in chunks:
            raw = None  # The next chunk may take its memory.
            raw = functional.linear(hidden[chunk], weight, bias)
            for whole, part in zip(
                scores, operations.score_rows(raw, targets[chunk], work.rules), strict=True
            ):
                whole[chunk] = part
            work.moved()
        if work.learns:
            ctx.save_for_backward(hidden, weight, bias, targets, scores.normalizers, scores.entropies)
            ctx.work, ctx.chunks, ctx.last = work, chunks, raw
        if not work.entropy_gradient:
            ctx.mark_non_differentiable(scores.entropies)
        if hidden.dtype == torch.float32:
            return scores.logprobs, scores.entropies
        return _by_exact_targets(hidden, weight, bias, targets, scores, work.rules), scores.entropies

    @staticmethod
    def backward(ctx: Any, logprob_gradients: torch.Tensor, entropy_gradients: torch.Tensor) -> Any:
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        work: HeadWork = ctx.work
        operations = operations_on(hidden.device)
        # A second backward pass through the same graph must not find the gradients of the first one here.
        raw, ctx.last = ctx.last, None
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = _zeros(weight) if ctx.needs_input_grad[1] else None
        by_bias = _zeros(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in reversed(ctx.chunks):
            if raw is None:
                raw = functional.linear(hidden[chunk], weight, bias)
            slopes = operations.write_gradients(
                raw,
                targets[chunk],
                TargetScores(normalizers[chunk], normalizers[chunk], entropies[chunk]),
                logprob_gradients[chunk],
                entropy_gradients[chunk] if work.entropy_gradient else None,
                work.rules,
            )
            if by_hidden is not None:
                torch.mm(slopes, weight, out=by_hidden[chunk])
            if by_weight is not None:
                _add_product(by_weight, slopes.t(), hidden[chunk])
            if by_bias is not None:
                by_bias += slopes.sum(0, dtype=torch.float32)
            del slopes
            raw = None  # The next chunk may take its memory.
            work.moved()
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None or bias is None else by_bias.to(bias.dtype),
            None,
            None,
        )


def _by_exact_targets(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scores: TargetScores,
    rules: HeadRules,
) -> torch.Tensor:
    """Return log-probabilities by the float32 logit of each target, which counts in the sum of all tokens as well.

    The output of the head is rounded, and a logit of 20 to an eighth. That of the target moves the result most.
    """
    rows = range(0, len(hidden), TARGETS_AT_ONCE)
    raw = [
        (
            hidden[first : first + TARGETS_AT_ONCE].float() * weight[targets[first : first + TARGETS_AT_ONCE]]
        ).sum(-1)
        for first in rows
    ]
    exact = torch.cat(raw) if raw else scores.logprobs
    if bias is not None:
        exact = exact + bias[targets]
    exact = rules.logits(exact)
    share = torch.exp(exact - scores.normalizers) - torch.exp(scores.logprobs)
    return exact - scores.normalizers - torch.log1p(share)


def _most_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, work: HeadWork, operations: HeadOperations
) -> int:
    """Return how many tokens a chunk may have: the more there is memory for, the fewer are computed again."""
    if operations is PLAIN:
        return work.chunk_tokens
    limit = work.chunk_tokens * KERNEL_CHUNKS
    if not work.learns or len(hidden) <= limit:
        return limit
    # While the raw output is kept, the backward pass makes the gradients, that of the weight in float32 first.
    coming = hidden.nbytes + weight.numel() * (torch.float32.itemsize + weight.element_size())
    spare = max(0, free_bytes(hidden.device) - coming)
    return max(limit, int(spare * SPARE_SHARE / (len(weight) * hidden.element_size())))


def _chunks(count: int, limit: int) -> list[slice]:
    """Return equal chunks of `count` tokens, as few as the limit allows."""
    number = -(-count // limit)
    size = -(-count // max(1, number))
    return [slice(first, min(first + size, count)) for first in range(0, count, size or 1)]


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product of matrices to float32 numbers, whatever type the matrices have."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left @ right
