"""The samples that decode.

Invariants: each sample is one vLLM request and leaves as soon as it ends; whatever vLLM raises reaches the caller of
`generate`, and what a caller no longer waits for is cancelled; the end of sequence is ours (stop tokens from the
checkpoint), so nothing depends on a tokenizer or on defaults of a generation config; logprobs are those of the sampled
tokens only. A sample comes from the engine's process once, with its record: no token costs this process anything.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flotilla_core.errors import Internal
from flotilla_core.version import Version
from flotilla_generator.engine.base import FinishReason, GenerationRequest, Sample, SampleSlot, Sampling, Span
from flotilla_generator.engine.vllm.sample_records import SampleRecord
from flotilla_generator.engine.vllm.stop_texts import stop_arguments

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
SEED_MASK = (1 << 63) - 1


@dataclass(eq=False)
class Running:
    """A sample that decodes."""

    engine_id: str
    slot: SampleSlot
    asked_at: float = field(default_factory=time.monotonic)


WRONG: Literal["wrong"] = "wrong"


class LiveVersions:
    """Tells which version of the weights was live at a time; before the first commit none was."""

    def __init__(self) -> None:
        self._since: list[tuple[float, Version | Literal["wrong"] | None]] = [(float("-inf"), None)]

    def switch(self, version: Version | None, needed_from: float) -> None:
        """Record that `version` is live from now on; nobody asks about a time before `needed_from` any more."""
        del self._since[: self._index(needed_from)]
        self._since.append((time.monotonic(), version))

    def retract(self) -> None:
        """Record that what is live since the last switch was never that version."""
        self._since[-1] = (self._since[-1][0], WRONG)

    def spans(self, record: SampleRecord, tokens: int) -> tuple[Span, ...]:
        """Return who wrote a sample: another version may write from where decoding resumed after a pause.

        They end where wrong weights began to write.
        """
        if record.first_token_at is None:
            return ()
        starts = [(self._at(record.first_token_at), 0)]
        for when, position in record.resumed:
            if (version := self._at(when)) != starts[-1][0]:
                starts.append((version, position))
        ends = [start for _, start in starts[1:]] + [tokens]
        spans = []
        for (version, start), end in zip(starts, ends, strict=True):
            if version == WRONG:
                break
            if end > start:
                spans.append(Span(version, start, end))
        return tuple(spans)

    def _at(self, when: float) -> Version | Literal["wrong"] | None:
        return self._since[self._index(when)][1]

    def _index(self, when: float) -> int:
        return bisect_right(self._since, when, key=lambda life: life[0]) - 1


def sampling_params(sampling: Sampling, slot: SampleSlot, end_of_sequence: tuple[int, ...]) -> Any:
    """Return vLLM's parameters for one sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = sampling.after(len(slot.prefix))
    stops = sampling.stop_token_ids + (() if sampling.ignore_eos else end_of_sequence)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(dict.fromkeys(stops)),
        ignore_eos=True,
        seed=None if sampling.temperature == 0 else slot.seed & SEED_MASK,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=stop_arguments(sampling.stop, len(slot.prefix)),
    )


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
        self._versions = LiveVersions()
        self._proved = asyncio.Event()
        self._proved.set()
        self.waiting = 0
        """Samples without a place in the engine, as of the last one that ended."""

    @property
    def running(self) -> list[Running]:
        """Every sample that has not ended."""
        return [one for group in self._requests.values() for one in group]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        """Decode all samples of `request`; those that ended together come together."""
        done: asyncio.Queue[Sample | BaseException] = asyncio.Queue()
        running = {
            Running(f"{request.request_id}:{index}", slot) for index, slot in enumerate(request.samples)
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
        names = [one.engine_id for name in request_ids for one in self._requests.get(name, ())]
        if names:
            # Not by the abort of AsyncLLM, which forgets a request at once: its tokens are in the engine's process.
            inside = self._llm().output_processor.external_req_ids
            known = [internal for name in names for internal in inside.get(name, ())]
            await self._llm().engine_core.abort_requests_async(known)
        return len(names)

    def switch(self, version: Version | None) -> None:
        """Record that `version` writes from here on."""
        oldest = min((one.asked_at for one in self.running), default=time.monotonic())
        self._versions.switch(version, needed_from=oldest)

    def hold(self) -> None:
        """Let no sample leave until `release`: the weights that decode are still compared."""
        self._proved.clear()

    def release(self) -> None:
        """Let samples leave."""
        self._proved.set()

    def retract(self) -> None:
        """Record that what writes is not the version that it was taken for: samples lose those tokens."""
        self._versions.retract()

    async def _deliver(
        self, request: GenerationRequest, running: Running, done: asyncio.Queue[Sample | BaseException]
    ) -> None:
        try:
            done.put_nowait(await self._decode(request, running))
        # The end of a task: whatever vLLM raises is handed to the caller of `generate`.
        except Exception as error:  # noqa: BLE001
            done.put_nowait(self._explained(error))

    async def _decode(self, request: GenerationRequest, running: Running) -> Sample:
        slot = running.slot
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt, *slot.prefix]}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        params = sampling_params(request.sampling, slot, self._end_of_sequence)
        stream = self._llm().generate(prompt, params, running.engine_id, priority=request.priority)
        outputs = [output async for output in stream]
        ended_at = time.monotonic()
        completion = outputs[-1].outputs[0] if outputs else None
        if completion is None or completion.finish_reason not in FINISH_REASONS:
            raise Internal(
                f"vLLM ended sample {slot.sample_id} without a reason we know", why=str(completion)
            )
        record = SampleRecord.read(outputs[-1].kv_transfer_params)
        token_ids = np.array(completion.token_ids, np.int32)
        if len(record.logprobs) != len(token_ids):
            raise Internal(
                f"sample {slot.sample_id} has {len(token_ids)} tokens and {len(record.logprobs)} log-probabilities",
                next_step="report this with the version of vLLM",
            )
        await self._proved.wait()
        spans = self._versions.spans(record, len(token_ids))
        written = len(token_ids) if record.first_token_at is None else 0
        kept = spans[-1].end if spans else written
        self.waiting = record.waiting
        first_token_at = ended_at if record.first_token_at is None else record.first_token_at
        return Sample(
            sample_id=slot.sample_id,
            token_ids=token_ids[:kept],
            logprobs=record.logprobs[:kept],
            finish_reason=(
                FINISH_REASONS[completion.finish_reason] if kept == len(token_ids) else FinishReason.ABORT
            ),
            spans=spans,
            queued_s=0.0,
            first_token_s=first_token_at - running.asked_at,
            total_s=ended_at - running.asked_at,
        )
