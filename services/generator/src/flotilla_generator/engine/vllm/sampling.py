"""Our sampling parameters in vLLM's terms, and its outputs in ours.

Invariants: the end of sequence is ours (stop tokens from the checkpoint), so nothing depends on a tokenizer or on
defaults of a generation config; logprobs are those of the sampled tokens only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_core.version import Version
from flotilla_generator.engine.base import FinishReason, Sampling, Span

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
SEED_MASK = (1 << 63) - 1


def sampling_params(sampling: Sampling, seed: int, end_of_sequence: tuple[int, ...], *, stream: bool) -> Any:
    """vLLM's parameters of one sample; `stream` when positions are wanted while it decodes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stops = sampling.stop_token_ids + (() if sampling.ignore_eos else end_of_sequence)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(dict.fromkeys(stops)),
        ignore_eos=True,
        seed=None if sampling.temperature == 0 else seed & SEED_MASK,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(token_ids: Any, entries: Any) -> NDArray[np.float32]:
    """The logprob of each sampled token out of vLLM's dictionaries."""
    pairs = zip(token_ids, entries or (), strict=True)
    return np.fromiter((entry[token].logprob for token, entry in pairs), np.float32, len(token_ids))


def engine_spans(weight_versions: Any) -> tuple[Span, ...]:
    """Version spans as the engine recorded them."""
    return tuple(Span(_version(span.version), span.start, span.end) for span in weight_versions or ())


def _version(tag: str) -> Version | None:
    """Our tags are `lineage.step`; the engine's own tag is from before the first commit."""
    lineage, dot, step = tag.partition(".")
    return Version(int(lineage), int(step)) if dot and lineage.isdigit() and step.isdigit() else None
