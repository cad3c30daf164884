"""Claims about calls that carry many requests, over gRPC, with the sim engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla.generator.v1 import generator_pb2_grpc
from flotilla_core import rpc
from flotilla_core.config.generators import GeneratorConfig, SimConfig
from flotilla_core.errors import FlotillaError, InvalidRequest, StaleVersion
from flotilla_core.rpc import status
from flotilla_core.service import Activities
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.sim.engine import SimEngine
from flotilla_generator.servicer import GeneratorServicer
from flotilla_testing.credentials import credential
from flotilla_testing.servers import serving

CONFIG = {"vocab_size": 64, "max_position_embeddings": 128, "eos_token_id": 1, "tie_word_embeddings": True}
LIMIT_S = 20.0


class Replica:
    """A served engine, and one call to it; a token takes 0.05 s."""

    def __init__(self, engine: SimEngine, servicer: GeneratorServicer, stub) -> None:
        self.engine = engine
        self.servicer = servicer
        self.stub = stub
        self._said: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.GenerateAnswer] = asyncio.Queue()
        self._heard = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        call = rpc.duplex(self.stub.GenerateMany, aiter(self._parts()), idle_timeout_s=LIMIT_S)
        async with aclosing(call) as messages:
            async for message in messages:
                for answer in message.answers:
                    self._answers.put_nowait(answer)

    async def _parts(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (part := await self._said.get()) is not None:
            yield part

    def ask(self, *requests: pb.GenerateRequest, cancel: tuple[str, ...] = ()) -> None:
        self._said.put_nowait(pb.GenerateManyRequest(requests=requests, cancelled=cancel))

    def end(self) -> None:
        self._said.put_nowait(None)

    async def leave(self) -> None:
        self._heard.cancel()
        await asyncio.gather(self._heard, return_exceptions=True)

    async def answer(self) -> pb.GenerateAnswer:
        """Return the next answer."""
        async with asyncio.timeout(LIMIT_S):
            return await self._answers.get()

    async def rest(self) -> list[pb.GenerateAnswer]:
        """Return the answers until the call ends."""
        async with asyncio.timeout(LIMIT_S):
            await self._heard
        return [self._answers.get_nowait() for _ in range(self._answers.qsize())]

    async def begun(self, count: int) -> None:
        """Wait until the engine has so many requests."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.engine.requests) != count:
                await asyncio.sleep(0.01)


def request(name: str, tokens: int = 1, samples: int = 1, **more: object) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(
        run_id="run",
        request_id=name,
        prompt_token_ids=to_tensor(np.array([2, 3, 4], np.int32)),
        samples=[pb.SampleSlot(sample_id=f"{name}/{i}", seed=7 * i) for i in range(samples)],
        sampling=pb.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True),
    )
    asked.MergeFrom(pb.GenerateRequest(**more))
    return asked


def failure_of(answer: pb.GenerateAnswer) -> FlotillaError | None:
    return status.from_status(answer.failure)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = GeneratorConfig(engine="sim", sim=SimConfig(seconds_per_token=0.05))
    engine = SimEngine(config, Checkpoint.read(tmp_path))
    servicer = GeneratorServicer(engine, Activities())
    trusted = credential(tmp_path)
    async with serving(servicer, credential=trusted) as address:
        await engine.start()
        servicer.open()
        async with rpc.connect(address, credential=trusted) as channel:
            one = Replica(engine, servicer, generator_pb2_grpc.GeneratorServiceStub(channel))
            yield one
            await one.leave()
    await engine.stop()


async def test_each_request_is_answered_once_and_whole_and_the_short_one_first(replica):
    replica.ask(request("long", tokens=20), request("several", tokens=10, samples=3))
    replica.ask(request("short"))
    replica.end()
    answers = {one.request_id: one for one in await replica.rest()}
    assert list(answers) == ["short", "several", "long"]
    assert [sample.sample_id for sample in answers["several"].samples] == [f"several/{i}" for i in range(3)]
    assert {from_tensor(one.samples[0].token_ids).size for one in answers.values()} == {1, 10, 20}


async def test_a_shared_call_gives_the_sample_of_a_call_of_its_own(replica):
    replica.ask(request("shared", tokens=9))
    shared = await replica.answer()
    alone = rpc.server_stream(replica.stub.Generate, request("shared", tokens=9), idle_timeout_s=LIMIT_S)
    (sample,) = [sample async for response in alone for sample in response.samples]
    (other,) = shared.samples
    assert (sample.token_ids, sample.logprobs) == (other.token_ids, other.logprobs)


async def test_a_request_that_fails_leaves_the_others_of_its_call_alone(replica):
    bad = request("bad", tokens=1)
    bad.sampling.max_tokens = 0
    replica.ask(request("good", tokens=4), bad, request("newer", min_version=Version(0, 4).to_proto()))
    replica.ask(request("after", tokens=2))
    replica.end()
    answers = {one.request_id: one for one in await replica.rest()}
    assert len(answers) == 4 and answers["good"].samples and answers["after"].samples
    assert isinstance(failure_of(answers["bad"]), InvalidRequest)
    assert "max_tokens is 0" in str(failure_of(answers["bad"]))
    assert isinstance(failure_of(answers["newer"]), StaleVersion)


async def test_what_nobody_waits_for_leaves_the_engine(replica):
    replica.ask(request("dropped", tokens=100), request("kept", tokens=8))
    await replica.begun(2)
    replica.ask(cancel=("dropped", "never asked"))
    await replica.begun(1)
    assert (await replica.answer()).request_id == "kept"
    replica.end()
    assert await replica.rest() == []


async def test_a_caller_that_leaves_leaves_nothing_in_the_engine(replica):
    replica.ask(request("a", tokens=100), request("b", tokens=100))
    await replica.begun(2)
    await replica.leave()
    await replica.begun(0)
    assert replica.engine.waiting_samples == 0 and not replica.engine.requests


async def test_a_drain_delivers_what_there_is_and_ends_the_call(replica):
    replica.ask(request("cut", tokens=100))
    await replica.begun(1)
    await replica.servicer.close(grace_s=0.2)
    (answer,) = await replica.rest()
    assert [sample.finish_reason for sample in answer.samples] == [pb.FINISH_REASON_ABORT]
