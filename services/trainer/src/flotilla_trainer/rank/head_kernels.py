"""Triton kernels over the raw output of a head: one pass scores all rows, one pass writes the gradient over them.

Invariants: numbers are read in the type of the head's output and computed in float32, so that no float32 copy of the
logits exists; a row is one token, and nothing passes between rows; the gradient takes the place of the numbers that it
belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import language as tl

from flotilla_trainer.rank.head_rules import HeadRules, TargetScores

BLOCK = 4096
"""The columns that a program handles at once."""
WARPS = 8

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Triton's own decorator has no types."""


def score_rows(raw: torch.Tensor, targets: torch.Tensor, rules: HeadRules) -> TargetScores:
    """Score one target in each row."""
    scores = TargetScores(*(raw.new_empty(len(raw), dtype=torch.float32) for _ in TargetScores._fields))
    if len(raw):
        with torch.cuda.device_of(raw):
            _score_row[(len(raw),)](
                raw, targets, *scores, raw.stride(0), raw.shape[1], *_numbers(rules), BLOCK, num_warps=WARPS
            )
    return scores


def write_gradients(
    raw: torch.Tensor,
    targets: torch.Tensor,
    scores: TargetScores,
    logprob_gradients: torch.Tensor,
    entropy_gradients: torch.Tensor | None,
    rules: HeadRules,
) -> torch.Tensor:
    """Return the gradient by the raw numbers; it takes their place."""
    if len(raw):
        by_entropy = entropy_gradients is not None
        given = logprob_gradients.contiguous()
        with torch.cuda.device_of(raw):
            _write_gradient[(len(raw), triton.cdiv(raw.shape[1], BLOCK))](
                raw,
                targets,
                scores.normalizers,
                scores.entropies,
                given,
                given if entropy_gradients is None else entropy_gradients.contiguous(),
                raw.stride(0),
                raw.shape[1],
                *_numbers(rules),
                by_entropy,
                BLOCK,
                num_warps=WARPS,
            )
    return raw


def _numbers(rules: HeadRules) -> tuple[float, float, float, bool]:
    return rules.scale, rules.softcap or 1.0, 1.0 / rules.temperature, bool(rules.softcap)


@jit
def _logit(
    raw: tl.tensor, scale: tl.tensor, softcap: tl.tensor, coldness: tl.tensor, capped: tl.constexpr
) -> tl.tensor:
    logit = raw.to(tl.float32) * scale
    if capped:
        # The hyperbolic tangent, of which Triton's language has the sigmoid alone.
        logit = softcap * (2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0)
    return logit * coldness


@jit
def _score_row(
    raw: tl.tensor,
    targets: tl.tensor,
    logprobs: tl.tensor,
    normalizers: tl.tensor,
    entropies: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    coldness: tl.tensor,
    capped: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = raw + row * stride
    # The sum of exp(logit - largest), and the sum of exp(logit - largest) (logit - largest).
    # The lowest number is finite, because minus infinity minus itself would be no number.
    largest = -3.0e38
    total = 0.0
    moment = 0.0
    for first in range(0, vocabulary, block):
        here = first + tl.arange(0, block)
        inside = here < vocabulary
        logit = _logit(tl.load(start + here, mask=inside, other=0.0), scale, softcap, coldness, capped)
        logit = tl.where(inside, logit, -3.0e38)
        top = tl.maximum(largest, tl.max(logit, 0))
        share = tl.exp(logit - top)
        lost = largest - top
        kept = tl.exp(lost)
        moment = kept * (moment + total * lost) + tl.sum(tl.where(share > 0.0, share * (logit - top), 0.0), 0)
        total = kept * total + tl.sum(share, 0)
        largest = top
    normalizer = largest + tl.log(total)
    target = tl.load(targets + row)
    chosen = _logit(tl.load(start + target), scale, softcap, coldness, capped)
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, tl.log(total) - moment / total)


@jit
def _write_gradient(
    raw: tl.tensor,
    targets: tl.tensor,
    normalizers: tl.tensor,
    entropies: tl.tensor,
    logprob_gradients: tl.tensor,
    entropy_gradients: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    coldness: tl.tensor,
    capped: tl.constexpr,
    by_entropy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    here = tl.program_id(1) * block + tl.arange(0, block)
    inside = here < vocabulary
    place = raw + row * stride + here
    logit = _logit(tl.load(place, mask=inside, other=0.0), scale, softcap, coldness, capped)
    gradient = tl.load(logprob_gradients + row)
    distance = logit - tl.load(normalizers + row)
    share = tl.exp(distance)
    slope = tl.where(here == tl.load(targets + row), gradient, 0.0) - gradient * share
    if by_entropy:
        pull = tl.load(entropy_gradients + row) * (distance + tl.load(entropies + row))
        slope -= tl.where(share > 0.0, share * pull, 0.0)
    if capped:
        steepness = logit / (softcap * coldness)
        slope *= 1.0 - steepness * steepness
    tl.store(place, (slope * (scale * coldness)).to(raw.dtype.element_ty), mask=inside)
