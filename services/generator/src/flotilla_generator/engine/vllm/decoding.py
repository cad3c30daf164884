"""The samples that decode.

Invariants: each sample is one vLLM request and leaves as soon as it ends; whatever vLLM raises reaches the caller of
`generate`, and what a caller no longer waits for is cancelled; where vLLM does not say which version wrote a token,
the switches are noted here; the end of sequence is ours (stop tokens from the checkpoint), so nothing depends on a
tokenizer or on defaults of a generation config; logprobs are those of the sampled tokens only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_core.errors import Internal
from flotilla_core.version import Version
from flotilla_generator.engine.base import FinishReason, GenerationRequest, Sample, SampleSlot, Sampling, Span
from flotilla_generator.engine.vllm.boot import tags_versions

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
SEED_MASK = (1 << 63) - 1


@dataclass(eq=False)
class Running:
    """A sample that decodes, and who wrote what of it: kept here where the engine does not say so itself.

    Where it is, and since which token each version writes.
    """

    engine_id: str
    slot: SampleSlot
    starts: list[tuple[Version | None, int]]
    token_ids: list[int] = field(default_factory=list)

    def switch(self, version: Version) -> None:
        """Record that `version` writes from here on."""
        position = len(self.token_ids)
        if self.starts[-1][1] == position:
            self.starts.pop()
        self.starts.append((version, position))

    def spans(self) -> tuple[Span, ...]:
        """Return the switches as spans."""
        ends = [start for _, start in self.starts[1:]] + [len(self.token_ids)]
        return tuple(
            Span(version, start, end)
            for (version, start), end in zip(self.starts, ends, strict=True)
            if end > start
        )


def sampling_params(sampling: Sampling, seed: int, end_of_sequence: tuple[int, ...], *, stream: bool) -> Any:
    """Return vLLM's parameters for one sample; `stream` when positions are wanted while it decodes."""
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
    """Return the logprob of each sampled token out of vLLM's dictionaries."""
    pairs = zip(token_ids, entries or (), strict=True)
    return np.fromiter((entry[token].logprob for token, entry in pairs), np.float32, len(token_ids))


def engine_spans(weight_versions: Any) -> tuple[Span, ...]:
    """Version spans as the engine recorded them."""
    return tuple(Span(_version(span.version), span.start, span.end) for span in weight_versions or ())


def _version(tag: str) -> Version | None:
    """Our tags are `lineage.step`; the engine's own tag is from before the first commit."""
    lineage, dot, step = tag.partition(".")
    return Version(int(lineage), int(step)) if dot and lineage.isdigit() and step.isdigit() else None


class Decoding:
    """Asks the vLLM that `llm` gives; `explained` says what an error of its means."""

    def __init__(
        self,
        llm: Callable[[], Any],
        end_of_sequence: tuple[int, ...],
        explained: Callable[[Exception], Exception],
    ) -> None:
        self._llm = llm
        self._end_of_sequence = end_of_sequence
        self._explained = explained
        self._requests: dict[str, set[Running]] = {}
        self.live: Version | None = None
        """The version that begins new samples."""

    @property
    def running(self) -> list[Running]:
        """Every sample that has not ended."""
        return [one for group in self._requests.values() for one in group]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        """Decode all samples of `request`; those that ended together come together."""
        done: asyncio.Queue[Sample | BaseException] = asyncio.Queue()
        running = {
            Running(f"{request.request_id}:{index}", slot, [(self.live, 0)])
            for index, slot in enumerate(request.samples)
        }
        self._requests[request.request_id] = running
        tasks = [asyncio.create_task(self._deliver(request, one, done)) for one in running]
        try:
            left = len(tasks)
            while left:
                outcomes = [await done.get()]
                while not done.empty():
                    outcomes.append(done.get_nowait())
                left -= len(outcomes)
                ended = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
                if ended:
                    yield ended
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
        finally:
            self._requests.pop(request.request_id, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End the samples of these requests, which deliver what they have; how many."""
        engine_ids = [one.engine_id for name in request_ids for one in self._requests.get(name, ())]
        if engine_ids:
            await self._llm().abort(engine_ids)
        return len(engine_ids)

    def switch(self, version: Version) -> None:
        """Record that `version` writes from here on, for all samples that decode now."""
        self.live = version
        for one in self.running:
            one.switch(version)

    async def _deliver(
        self, request: GenerationRequest, running: Running, done: asyncio.Queue[Sample | BaseException]
    ) -> None:
        try:
            done.put_nowait(await self._decode(request, running))
        # The end of a task: whatever vLLM raises is handed to the caller of `generate`.
        except Exception as error:  # noqa: BLE001
            done.put_nowait(self._explained(error))

    async def _decode(self, request: GenerationRequest, running: Running) -> Sample:
        llm, slot = self._llm(), running.slot
        tags = tags_versions(llm)
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt, *slot.prefix]}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        params = sampling_params(
            request.sampling.after(len(slot.prefix)),
            slot.seed,
            self._end_of_sequence,
            stream=not tags,
        )
        started = time.monotonic()
        first: float | None = None
        logprobs = []
        completion = None
        async for output in llm.generate(prompt, params, running.engine_id, priority=request.priority):
            first = first or time.monotonic()
            completion = output.outputs[0]
            running.token_ids.extend(completion.token_ids)
            logprobs.append(sampled_logprobs(completion.token_ids, completion.logprobs))
        if completion is None or completion.finish_reason not in FINISH_REASONS:
            raise Internal(
                f"vLLM ended sample {slot.sample_id} without a reason we know", why=str(completion)
            )
        spans = engine_spans(completion.weight_versions) if tags else running.spans()
        ended = time.monotonic()
        return Sample(
            sample_id=slot.sample_id,
            token_ids=np.array(running.token_ids, np.int32),
            logprobs=np.concatenate(logprobs),
            finish_reason=FINISH_REASONS[completion.finish_reason],
            spans=spans,
            queued_s=0.0,
            first_token_s=(first or ended) - started,
            total_s=ended - started,
        )
