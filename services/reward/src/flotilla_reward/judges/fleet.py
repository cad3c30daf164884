"""Calls of the generators that hold a judge of the fleet.

Invariants: a prompt is the judge's own chat template over both messages, in tokens of its own tokenizer, which is that
of its generators or nothing is asked. Decoding is greedy. A request goes to the generator with the fewest of ours, and
to another one where that does not answer; when none answers the judge is away, which is no verdict.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core import ids, rpc
from flotilla_core.config import FleetJudgeConfig
from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    InvalidRequest,
    Mismatch,
    Unavailable,
)
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_data.tokenizer import Tokenizer
from flotilla_reward.judges.form import Asked
from flotilla_reward.judges.transport import Completion, Queue, Refused, away, shortened

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub

TRIES = 3
SAMPLE = "verdict"
_TRIED = Asked("a", "b")

Connect = Callable[[str], grpc.aio.Channel]
FolderOf = Callable[[str], Awaitable[Path]]
"""Returns the model folder of a judge on this host, by its name; it may have to be fetched."""


class FleetJudge:
    """One judge of the fleet: its tokenizer and its connections, which calls share."""

    def __init__(self, name: str, config: FleetJudgeConfig, connect: Connect, folder_of: FolderOf) -> None:
        self.name = name
        self.config = config
        self.queue = Queue(config.concurrency)
        self._connect = connect
        self._folder_of = folder_of
        self._tokenizer: Tokenizer | None = None
        self._loading = asyncio.Lock()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._asked: Counter[str] = Counter()
        """Our requests under way, by address."""
        self._now: frozenset[str] = frozenset()

    def held_by(self, generators: pb.JudgeGenerators) -> HeldJudge:
        """Return the way to the judge through the generators that hold it now."""
        self._now = frozenset(generators.addresses)
        return HeldJudge(self, generators)

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the judge, which is loaded once."""
        async with self._loading:
            if self._tokenizer is None:
                folder = await self._folder_of(self.name)
                self._tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        return self._tokenizer

    async def prompt(self, asked: Asked) -> list[int]:
        """Return a question as the model reads it; a template that refuses a system's message gets one of the user."""
        tokenizer = await self.tokenizer()
        system, user = ({"role": "system", "content": asked.system}, {"role": "user", "content": asked.user})
        alone = {"role": "user", "content": f"{asked.system}\n\n{asked.user}"}

        def tokens() -> list[int]:
            try:
                text = tokenizer.render_chat([system, user])
            except InvalidConfig:
                text = tokenizer.render_chat([alone])
            return tokenizer.encode(text)

        return await asyncio.to_thread(tokens)

    async def generated(self, address: str, request: gen.GenerateRequest) -> gen.GeneratedSample:
        """Return the sample of a request to one generator."""
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        stub: GeneratorServiceAsyncStub = GeneratorServiceStub(self._channels[address])
        self._asked[address] += 1
        limit_s = self.config.timeout_s
        try:
            stream = rpc.server_stream(stub.Generate, request, idle_timeout_s=limit_s, timeout_s=limit_s)
            async with aclosing(stream) as replies:
                async for reply in replies:
                    for sample in reply.samples:
                        if sample.finish_reason != gen.FINISH_REASON_ABORT:
                            return sample
            raise Unavailable("the generator ended without the answer", where=address)
        finally:
            self._asked[address] -= 1

    def nearest(self, addresses: Sequence[str]) -> list[str]:
        """Return the addresses, those with the fewest requests of ours first."""
        return sorted(addresses, key=lambda address: self._asked[address])

    async def close(self) -> None:
        """Close all connections; the next request makes new ones."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def forget_idle(self) -> None:
        """Close the connections to generators that hold the judge no more, once none of our requests is there."""
        for address in [*self._channels]:
            if address not in self._now and not self._asked[address]:
                await self._channels.pop(address).close()


class HeldJudge:
    """The way to a judge through the generators that hold it now."""

    def __init__(self, judge: FleetJudge, generators: pb.JudgeGenerators) -> None:
        self._judge = judge
        self._generators = generators

    @property
    def model(self) -> str:
        return str(self._judge.config.model)

    @property
    def place(self) -> str:
        return f"the generators of judge {self._judge.name}"

    @property
    def about(self) -> list[Any]:
        return ["fleet", self._judge.config.max_tokens, *sorted(self._generators.weights_stamps)]

    async def check(self) -> None:
        name, config = self._judge.name, self._judge.config
        if not self._generators.addresses:
            raise FailedPrecondition(
                f"judge {name} is held by the fleet, which has to run to ask it",
                where=f"judges.{name}",
                why="the call names no generator that holds it",
                next_step="flotilla up, then flotilla run plan or run start, which measure the agreement of judges",
            )
        await self._judge.forget_idle()
        tokenizer = await self._judge.tokenizer()
        theirs = self._generators.tokenizer_digest
        if theirs and theirs != tokenizer.digest:
            raise Mismatch(
                f"the reward service has another tokenizer than the generators of judge {name}",
                where=f"model {config.model}",
                why=f"digest {theirs[:12]} there, {tokenizer.digest[:12]} here",
                next_step="start both with the same model folder",
            )
        await self._judge.prompt(_TRIED)

    def shown(self, text: str) -> str:
        return shortened(text)

    async def complete(self, asked: Asked, response_format: Mapping[str, Any], since: float) -> Completion:
        judge = self._judge
        async with judge.queue.places:
            judge.queue.require_answers(since, judge.name, self.place)
            try:
                prompt = await judge.prompt(asked)
            except FlotillaError as error:
                raise Refused(str(error)) from None
            return await self._answered(prompt)

    async def _answered(self, prompt: list[int]) -> Completion:
        judge, trouble = self._judge, ""
        tokenizer = await judge.tokenizer()
        sampling = gen.SamplingParams(max_tokens=judge.config.max_tokens, stop_token_ids=tokenizer.eos_ids)
        for address in self._in_turn():
            request = gen.GenerateRequest(
                request_id=ids.new_request_id(),
                prompt_token_ids=to_tensor(np.array(prompt, np.int32)),
                samples=[gen.SampleSlot(sample_id=SAMPLE)],
                sampling=sampling,
            )
            try:
                sample = await judge.generated(address, request)
            except InvalidRequest as error:
                raise Refused(shortened(str(error))) from None  # any other one would refuse it too
            except FlotillaError as error:
                trouble = shortened(str(error))
                continue
            written = from_tensor(sample.token_ids).tolist()
            return Completion(tokenizer.decode(written), len(prompt) + len(written))
        judge.queue.had_no_answer(trouble)
        raise away(judge.name, self.place, trouble)

    def _in_turn(self) -> list[str]:
        """Return whom to ask, one after the other."""
        return self._judge.nearest(self._generators.addresses)[:TRIES]
