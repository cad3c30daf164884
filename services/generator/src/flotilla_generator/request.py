"""Generate requests: from the wire to the engine, and samples back.

Invariant: whatever `read_request` accepts, an engine can decode; every refusal names the field and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import version_pb2
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_generator.engine.base import (
    EngineInfo,
    FinishReason,
    GenerationRequest,
    Sample,
    SampleSlot,
    Sampling,
)

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
HIGHEST_TEMPERATURE = 100.0
LOWEST_TEMPERATURE = 0.01
"""The lowest temperature: engines raise lower ones to it, and logprobs would be those of another than asked for."""


def read_request(request: pb.GenerateRequest, info: EngineInfo, cache_salt: str | None) -> GenerationRequest:
    """Validate against what the engine can do."""
    if not request.request_id:
        raise InvalidRequest("request_id is empty")
    prompt = _prompt(request, info)
    if not request.samples:
        raise InvalidRequest(
            "samples is empty", where=request.request_id, next_step="ask for at least one sample"
        )
    names = {slot.sample_id for slot in request.samples}
    if len(names) != len(request.samples) or "" in names:
        raise InvalidRequest("sample ids must be given and differ", where=request.request_id)
    return GenerationRequest(
        request_id=request.request_id,
        prompt=prompt,
        samples=tuple(
            SampleSlot(slot.sample_id, slot.seed, _prefix(slot, len(prompt), request.sampling, info))
            for slot in request.samples
        ),
        sampling=_sampling(request.sampling, info),
        cache_salt=cache_salt,
        priority=request.priority,
    )


def write_samples(samples: Iterable[Sample], waiting: int) -> Iterator[pb.GenerateResponse]:
    """Samples as they travel, about two mebibytes in one message, each with how many others wait."""
    message, size = pb.GenerateResponse(waiting_samples=waiting), 0
    for sample in samples:
        message.samples.append(write_sample(sample))
        size += sample.token_ids.nbytes + sample.logprobs.nbytes
        if size >= PART_BYTES:
            yield message
            message, size = pb.GenerateResponse(waiting_samples=waiting), 0
    if message.samples:
        yield message


def write_sample(sample: Sample) -> pb.GeneratedSample:
    """One sample as it travels."""
    return pb.GeneratedSample(
        sample_id=sample.sample_id,
        token_ids=to_tensor(sample.token_ids),
        logprobs=to_tensor(sample.logprobs),
        finish_reason=FINISH_REASONS[sample.finish_reason],
        version_spans=[
            version_pb2.VersionSpan(
                version=None if span.version is None else span.version.to_proto(),
                start=span.start,
                end=span.end,
            )
            for span in sample.spans
        ],
        timing=pb.SampleTiming(
            queued=duration(sample.queued_s),
            first_token=duration(sample.first_token_s),
            total=duration(sample.total_s),
        ),
    )


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def _prompt(request: pb.GenerateRequest, info: EngineInfo) -> list[int]:
    ids = (
        from_tensor(request.prompt_token_ids)
        if request.HasField("prompt_token_ids")
        else np.empty(0, np.int32)
    )
    where = request.request_id
    if ids.size == 0:
        raise InvalidRequest("prompt_token_ids is empty", where=where)
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise InvalidRequest(
            f"prompt_token_ids must be one row of integers, not {ids.dtype}{list(ids.shape)}", where=where
        )
    if ids.size >= info.max_model_tokens:
        raise InvalidRequest(
            f"a prompt of {ids.size} tokens leaves no room for a response",
            where=where,
            why=f"prompt and response share {info.max_model_tokens} tokens",
            next_step="shorten the prompt or raise generator.max_model_tokens",
        )
    _refuse_strangers(ids, info, where)
    return list(map(int, ids))


def _prefix(
    slot: pb.SampleSlot, prompt_tokens: int, sampling: pb.SamplingParams, info: EngineInfo
) -> tuple[int, ...]:
    """Tokens that a sample has from before, with room for another one."""
    if not slot.HasField("prefix_token_ids"):
        return ()
    ids = from_tensor(slot.prefix_token_ids)
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise InvalidRequest(
            f"prefix_token_ids must be one row of integers, not {ids.dtype}{list(ids.shape)}",
            where=slot.sample_id,
        )
    room = min(sampling.max_tokens, info.max_model_tokens - prompt_tokens)
    if ids.size >= room:
        raise InvalidRequest(
            f"a prefix of {ids.size} tokens leaves no room for another one",
            where=slot.sample_id,
            why=f"the whole response has room for {room} (max_tokens, and what the prompt leaves of the model's "
            f"{info.max_model_tokens})",
            next_step="the sample is complete: do not ask for more of it",
        )
    if ids.size:
        _refuse_strangers(ids, info, slot.sample_id)
    return tuple(map(int, ids))


def _refuse_strangers(ids: np.ndarray, info: EngineInfo, where: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= info.vocabulary_size:
        raise InvalidRequest(
            f"token id {low if low < 0 else high} is outside the vocabulary of {info.vocabulary_size}",
            where=where,
            next_step="tokenize with the tokenizer of the model that this replica holds",
        )


def _sampling(sampling: pb.SamplingParams, info: EngineInfo) -> Sampling:
    temperature = sampling.temperature
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE):
        raise InvalidRequest(
            f"temperature {temperature:g} is outside its range",
            why=f"it is 0 (greedy) or between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}",
        )
    if not 0 <= sampling.top_p <= 1:
        raise InvalidRequest(f"top_p {sampling.top_p:g} is outside 0 to 1")
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens is 0", next_step="ask for at least one token")
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(f"min_tokens {sampling.min_tokens} is above max_tokens {sampling.max_tokens}")
    strangers = [token for token in sampling.stop_token_ids if token >= info.vocabulary_size]
    if strangers:
        raise InvalidRequest(f"stop token {strangers[0]} is outside the vocabulary of {info.vocabulary_size}")
    if "" in sampling.stop:
        raise InvalidRequest("a text of stop is empty")
    if sampling.stop and not info.reads_text:
        raise InvalidRequest(
            "stop needs a tokenizer, and this replica has none",
            next_step="put the model's tokenizer.json into its folder, or use stop_token_ids",
        )
    return Sampling(
        temperature=temperature,
        max_tokens=min(sampling.max_tokens, info.max_model_tokens),
        top_p=sampling.top_p or 1.0,
        top_k=0 if sampling.top_k >= info.vocabulary_size else sampling.top_k,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        ignore_eos=sampling.ignore_eos,
    )
