"""Log-probabilities of the sampled tokens on a GPU, in one pass over the logits.

vLLM reads all logits three times for them, each row by one small program: twice for the log-probability, and once for
the rank of the token, which nobody here asks for. That is as long as an eighth of a decode step of a small model.

Invariants: the numbers are float32, of the logits that the token was sampled from; the kernel is compared with torch
before its first use, and where it cannot be compiled or differs, vLLM's own stays. This module imports Triton: it is
imported only where a GPU is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

log = logging.getLogger(__name__)

PARTS = 16
"""Programs that share a row."""
BLOCK = 1024
TOLERANCE = 1e-5


@triton.jit
def _add_parts(logits, stride, vocabulary, maxima, sums, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest logit of a part of a row, and the sum of exponentials relative to it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.cdiv(tl.cdiv(vocabulary, BLOCK), PARTS) * BLOCK
    start = part * width
    end = tl.minimum(start + width, vocabulary)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(start, end, BLOCK):
        at = place + lanes
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, values)
        # A token that cannot be sampled has minus infinity, and so may all that a lane has seen.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.exp(values - base)
        highest = higher
    top = tl.max(highest, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima + row * PARTS + part, top)
    tl.store(sums + row * PARTS + part, tl.sum(total * tl.exp(highest - base), axis=0))


@triton.jit
def _finish(logits, stride, tokens, maxima, sums, logprobs, PARTS: tl.constexpr):
    """Join the parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    parts = row * PARTS + tl.arange(0, PARTS)
    tops = tl.load(maxima + parts)
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(sums + parts) * tl.exp(tops - top), axis=0)
    chosen = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - top - tl.log(total))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of one token of each row; nothing waits for the device."""
    rows, vocabulary = logits.shape
    parts = torch.empty((2, rows, PARTS), dtype=torch.float32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _add_parts[(rows, PARTS)](
        logits, logits.stride(0), vocabulary, parts[0], parts[1], PARTS=PARTS, BLOCK=BLOCK
    )
    _finish[(rows,)](logits, logits.stride(0), tokens, parts[0], parts[1], logprobs, PARTS=PARTS)
    return logprobs


def agrees_with_torch(device: torch.device) -> bool:
    """Return whether the kernel computes what torch computes, on logits as they occur."""
    random = torch.Generator(device).manual_seed(0)
    for dtype, vocabulary in ((torch.bfloat16, 70_001), (torch.float32, 513)):
        logits = torch.randn((5, vocabulary), generator=random, device=device).mul_(8).to(dtype)
        logits[1, : vocabulary // 2] = float("-inf")
        tokens = logits.argmax(1)
        expected = logits.float().log_softmax(1).gather(1, tokens[:, None])[:, 0]
        if not torch.allclose(token_logprobs(logits, tokens), expected, atol=TOLERANCE, rtol=TOLERANCE):
            return False
    return True


def use_in_vllm(device: torch.device) -> bool:
    """Have vLLM's sampler take log-probabilities from here, where nothing but the sampled token is asked for."""
    try:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample import sampler

        names = vars(sampler)
        original = names["compute_topk_scores"]
        if not agrees_with_torch(device):
            raise RuntimeError("its numbers are not those of torch")
    # Whatever a compiler or another release of vLLM says: the engine works as it is.
    except Exception as error:  # noqa: BLE001
        log.warning("log-probabilities are computed by vLLM's slower kernels: %s", error)
        return False
    names["compute_topk_scores"] = _sampled_only(original, LogprobsTensors)
    return True


def _sampled_only(original: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
    def scores(
        logits: torch.Tensor,
        num_logprobs: int,
        sampled_token_ids: torch.Tensor,
        cu_num_logits: Any = None,
        **more: Any,
    ) -> Any:
        asked = num_logprobs or cu_num_logits is not None or more.get("logits_mode")
        if asked or more.get("max_per_req_token_ids") or logits.stride(1) != 1:
            return original(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)
        return tensors(
            logprob_token_ids=sampled_token_ids[:, None],
            logprobs=token_logprobs(logits, sampled_token_ids)[:, None],
            selected_token_ranks=torch.zeros_like(sampled_token_ids),
        )

    return scores
