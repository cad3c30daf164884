"""A vLLM engine with the trainer's end of each sync, for the tests of weights that reach it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.engine.base import Applied, GenerationRequest, KvPolicy, Sample, SampleSlot, Sampling
from flotilla_generator.engine.vllm.engine import VllmEngine
from flotilla_generator.weights import WeightSession
from flotilla_testing.unrelated_models import Tensors, difference, make_model, manifest_of, tensors_of
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest

LONG = 400
"""Tokens of a sample that still decodes, on any machine, when a version that is already staged is committed."""


class Bench:
    """One vLLM for all tests of this module, and the trainer's end of each sync."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.weights = WeightSession(engine)
        self.run_id = "run"
        self.epoch = 0
        self.step = 0
        self.model = make_model(0)
        self._names = 0

    async def join(self, manifest: Manifest) -> Sender:
        self.epoch += 1
        sender = Sender.listen("127.0.0.1", self.epoch, 2, "gloo", 20.0)
        connecting = asyncio.create_task(asyncio.to_thread(sender.connect, manifest))
        try:
            await self.weights.join(self.run_id, self.group(sender.port, sender.secret), 1, manifest)
        except WeightsMismatch:
            sender.abort()
            await asyncio.wait([connecting])
            connecting.exception()
            raise
        await connecting
        return sender

    def group(self, port: int, secret: bytes) -> weights_pb2.WeightGroup:
        group = weights_pb2.WeightGroup(
            epoch=self.epoch,
            backend=1,
            host="127.0.0.1",
            port=port,
            secret=secret,
            world_size=2,
            sender_ranks=[0],
        )
        group.timeout.FromSeconds(20)
        return group

    async def stage(self, tensors: Tensors, sent: Tensors | None = None) -> weights_pb2.WeightDigests:
        """Send the next version; `sent` are the bytes on the wire where they differ from what the digests are of."""
        sender = await self.join(manifest := manifest_of(tensors))
        self.step += 1
        version = Version(0, self.step)
        wire = [(spec.name, (sent or tensors)[spec.name]) for spec in manifest.tensors]
        try:
            await asyncio.gather(
                asyncio.to_thread(sender.publish, manifest, wire),
                self.weights.stage(self.run_id, self.epoch, version),
            )
        finally:
            sender.close()
        return weights_pb2.WeightDigests(
            version=version.to_proto(),
            manifest_digest=manifest.digest,
            tensor_digests=tensor_digests(tensors[spec.name] for spec in manifest.tensors),
        )

    @asynccontextmanager
    async def told(self, switch: str) -> AsyncIterator[None]:
        """The worker has this switch on."""
        await self.engine.workers.ask(switch, True)
        try:
            yield
        finally:
            await self.engine.workers.ask(switch, False)

    async def commit(
        self, staged: weights_pb2.WeightDigests, kv_policy: KvPolicy = KvPolicy.RECOMPUTE
    ) -> Applied:
        version = Version.from_proto(staged.version)
        return await self.weights.commit(self.run_id, self.epoch, version, kv_policy, staged)

    async def publish(self, tensors: Tensors, sent: Tensors | None = None) -> Applied:
        """A whole sync."""
        return await self.commit(await self.stage(tensors, sent))

    async def sync(self, model: torch.nn.Module) -> Applied:
        applied = await self.publish(tensors_of(model))
        self.model = model
        return applied

    def prompts(self, count: int) -> list[list[int]]:
        random = np.random.default_rng(count)
        return [random.integers(2, 256, 8 + index % 20).tolist() for index in range(count)]

    async def sample(
        self, prompts: Iterable[list[int]], sampling: Sampling, salt: str | None = None
    ) -> list[tuple[list[int], Sample]]:
        async def one(prompt: list[int]) -> tuple[list[int], Sample]:
            self._names += 1
            name = f"request-{self._names}"
            request = GenerationRequest(name, prompt, (SampleSlot(name, self._names),), sampling, salt)
            ((sample,),) = [ended async for ended in self.engine.generate(request)]
            return prompt, sample

        return list(await asyncio.gather(*map(one, prompts)))

    async def decoding(self, count: int) -> asyncio.Task[list[tuple[list[int], Sample]]]:
        """Start long samples and wait until each has tokens: a request that came after them has ended."""
        task = asyncio.create_task(self.sample(self.prompts(count), Sampling(1.0, LONG, ignore_eos=True)))
        await asyncio.sleep(0)
        await self.sample(self.prompts(1), Sampling(1.0, 1, ignore_eos=True))
        assert not task.done()
        return task

    @property
    def last_seed(self) -> int:
        """Of the sample that was asked for last."""
        return self._names

    def in_engine(self) -> int:
        return int(self.engine.llm.output_processor.get_num_unfinished_requests())

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Inside the block vLLM takes requests and decodes nothing, as during a commit."""
        await self.engine.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            await self.engine.llm.resume_generation()

    async def wait_paused(self) -> None:
        async with asyncio.timeout(60):
            while not await self.engine.llm.is_paused():
                await asyncio.sleep(0.002)

    async def wait_in_engine(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.in_engine() != count:
                await asyncio.sleep(0.002)

    async def worst_difference(self, temperature: float) -> float:
        """Between vLLM's logprobs and the current model's, over 64 prompts of 16 sampled tokens."""
        sampling = Sampling(temperature, 16, ignore_eos=True)
        drawn = await self.sample(self.prompts(64), sampling)
        return max(difference(self.model, prompt, sample, temperature) for prompt, sample in drawn)
