"""Claims about samples on their way from vLLM; the engine itself is not started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_core.errors import Internal
from flotilla_core.version import Version
from flotilla_generator.engine.base import FinishReason, GenerationRequest, Sample, SampleSlot, Sampling, Span
from flotilla_generator.engine.vllm import decoding
from flotilla_generator.engine.vllm.decoding import Decoding
from flotilla_generator.engine.vllm.sample_records import SampleRecord

REQUEST = GenerationRequest(
    "request", [5, 6], (SampleSlot("a", 1), SampleSlot("b", 2)), Sampling(1.0, 8, ignore_eos=True)
)


class Llm:
    """The part of AsyncLLM that decoding uses: its requests end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[str, asyncio.Future[Any]] = {}
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(external_req_ids={})

    @property
    def engine_core(self) -> Llm:
        return self

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names

    async def generate(self, prompt: Any, params: Any, name: str, *, priority: int) -> AsyncIterator[Any]:
        self.output_processor.external_req_ids[name] = [f"{name}-internal"]
        self.ends[name] = asyncio.get_running_loop().create_future()
        yield await self.ends[name]

    def end(self, name: str, tokens: list[int], reason: str, record: SampleRecord | None) -> None:
        completion = SimpleNamespace(token_ids=tokens, finish_reason=reason)
        written = None if record is None else record.written()
        self.ends[name].set_result(SimpleNamespace(outputs=[completion], kv_transfer_params=written))


def record(*logprobs: float, **more: Any) -> SampleRecord:
    return SampleRecord(np.array(logprobs, np.float32), **more)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    monkeypatch.setattr(decoding, "sampling_params", lambda *_: None)
    return Llm()


async def started(llm: Llm, one: Decoding) -> asyncio.Task[list[Sample]]:
    async def draw() -> list[Sample]:
        return [sample async for ended in one.generate(REQUEST) for sample in ended]

    task = asyncio.create_task(draw())
    while len(llm.ends) < len(REQUEST.samples):
        await asyncio.sleep(0)
    return task


async def test_a_sample_comes_once_with_what_the_engine_process_recorded(llm: Llm) -> None:
    one = Decoding(lambda: llm, (), lambda error: error)
    drawing = await started(llm, one)
    asked = one.running[0].asked_at
    one.switch(Version(0, 1))
    switched = asked + 1e6
    llm.end(
        "request:0", [7, 8, 9], "length", record(-1, -2, -3, first_token_at=asked, resumed=((switched, 2),))
    )
    llm.end("request:1", [4], "stop", record(-4, first_token_at=asked + 0.5, waiting=6))
    first, second = sorted(await drawing, key=lambda sample: sample.sample_id)
    assert first.token_ids.tolist() == [7, 8, 9] and first.logprobs.tolist() == [-1, -2, -3]
    assert first.spans == (Span(None, 0, 2), Span(Version(0, 1), 2, 3))
    assert second.finish_reason is FinishReason.STOP
    assert one.waiting == 6 and one.running == []


async def test_no_sample_leaves_before_its_weights_are_proved_and_none_with_tokens_of_wrong_ones(
    llm: Llm,
) -> None:
    one = Decoding(lambda: llm, (), lambda error: error)
    drawing = await started(llm, one)
    before = one.running[0].asked_at
    one.switch(Version(0, 1))
    one.hold()
    one.switch(Version(0, 2))
    llm.end(
        "request:0",
        [7, 8, 9],
        "length",
        record(-1, -2, -3, first_token_at=before, resumed=((before + 1e6, 2),)),
    )
    llm.end("request:1", [4], "stop", record(-4, first_token_at=before + 1e6))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not drawing.done() and len(one.running) == 2
    one.retract()
    one.release()
    first, second = sorted(await drawing, key=lambda sample: sample.sample_id)
    assert (first.token_ids.tolist(), first.logprobs.tolist()) == ([7, 8], [-1, -2])
    assert first.spans == (Span(None, 0, 2),)
    assert len(second.token_ids) == 0 and second.spans == ()
    assert {first.finish_reason, second.finish_reason} == {FinishReason.ABORT}


async def test_an_abort_ends_samples_where_their_tokens_are(llm: Llm) -> None:
    one = Decoding(lambda: llm, (), lambda error: error)
    drawing = await started(llm, one)
    assert await one.abort(["request", "unknown"]) == 2
    assert sorted(llm.aborted) == ["request:0-internal", "request:1-internal"]
    llm.end("request:0", [7], "abort", record(-1, first_token_at=0.0))
    llm.end("request:1", [], "abort", record())
    samples = await drawing
    assert {sample.finish_reason for sample in samples} == {FinishReason.ABORT}
    assert sorted(len(sample.token_ids) for sample in samples) == [0, 1]
    assert await one.abort(["request"]) == 0


async def test_tokens_without_their_logprobs_are_an_error(llm: Llm) -> None:
    one = Decoding(lambda: llm, (), lambda error: error)
    drawing = await started(llm, one)
    llm.end("request:0", [7, 8], "length", None)
    with pytest.raises(Internal, match="2 tokens and 0 log-probabilities"):
        await drawing
