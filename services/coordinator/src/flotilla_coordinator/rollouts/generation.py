"""Generates one group: every slot is delivered exactly once, over any number of replica losses.

Invariants: a sample is yielded at most once per call, whatever a replica repeats. Only missing samples are issued
again, with a higher attempt. Seeds depend on the sample's id and on the place where a piece of it begins, so a new
attempt from the start differs by its machine alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from google.protobuf.duration_pb2 import Duration

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import TurnRecord
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.samples import PartialSample, SampleValidator
from flotilla_coordinator.rollouts.shared_calls import SharedCalls
from flotilla_core import ids, rpc
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import Exhausted, FlotillaError, InvalidRequest, Mismatch, StaleVersion, Unavailable
from flotilla_core.rpc import Load, Replica, ReplicaPool
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub

CANARY = -2
EVALUATION = -1
"""Priorities of samples that a whole step waits for; rollouts have the number of their step, so older steps are first.
"""

DECODED_HERE = 256
"""Tokens whose text costs the event loop no more than to hand them to a thread: 0.04 ms."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and the slots to fill."""

    prompt_token_ids: np.ndarray
    sample_ids: tuple[str, ...]
    sampling: SamplingConfig
    min_version: Version
    timeout_s: float
    max_attempts: int
    resume_partial: bool = False
    """True to continue after the tokens that a generator wrote before it gave a sample up."""
    gather_s: float = 0.0
    """The longest time that a finished sample waits in the generator, so that several share one message."""
    priority: int = 0
    conversation: str = ""
    """Prompts of one conversation go to the same replica while it has room."""
    instance_id: str = ""
    """The one replica that may answer; empty takes any."""
    prompt: Prompt | None = None
    """The row of the data set, where its samples are episodes."""
    turns: Mapping[str, Sequence[TurnRecord]] | None = None
    """Recorded turns of episodes, by their slots; these go on where the turns end. None: the ledger has no such sample,
    so no turn of its is recorded."""
    world: str = ""
    """The name from which the seed of an environment is made: one for all episodes that are compared."""


class Sampler(Protocol):
    """Makes samples of the policy: what is above asks for slots, and does not know how they are filled."""

    def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        """Yield each slot's sample as it ends, and each slot once; raise where one cannot be filled."""
        ...


class Generation:
    """A `Sampler` whose samples are single responses: it sends groups to the replicas that may serve them."""

    def __init__(
        self,
        run_id: str,
        seed: int,
        tokenizer: Tokenizer,
        *,
        pool: ReplicaPool[GeneratorServiceAsyncStub],
        serves: Callable[[str, Version], bool],
        wait_limit_s: float,
        lost: Callable[[tuple[str, ...], FlotillaError], None],
    ) -> None:
        self._run_id = run_id
        self._seed = seed
        self._tokenizer = tokenizer
        self._pool = pool
        self._serves = serves
        self._wait_limit_s = wait_limit_s
        self._lost = lost
        self._shared = SharedCalls()
        self.validator = SampleValidator()
        """Checks every delivered sample."""

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        """Yield each slot's sample as it ends; raise Exhausted when a slot has no attempts left."""
        missing = {sample_id: PartialSample(sample_id) for sample_id in request.sample_ids}
        cause: FlotillaError | None = None
        for attempt in range(request.max_attempts):
            replica = await self._acquire(request, len(missing))
            load = self._load(request, len(missing))
            try:
                async with aclosing(self._call(replica, request, missing.values(), attempt)) as responses:
                    async for delivered in responses:
                        whole, rejected = self._taken(delivered, request, missing, replica, attempt)
                        cause = rejected or cause
                        for sample in await self._with_texts(whole, request.sampling):
                            yield sample
            except StaleVersion as error:
                cause = error
            except InvalidRequest:
                raise  # any other replica would refuse it too
            except FlotillaError as error:  # another replica may succeed
                cause = error
                self._pool.eject(replica.instance_id, str(error))
            finally:
                self._pool.release(replica, load)
            if not missing:
                return
            self._lost(tuple(missing), cause or Unavailable(f"{replica.name} ended the stream early"))
        raise Exhausted(
            f"{len(missing)} samples were issued {request.max_attempts} times and never came back",
            where=next(iter(missing)),
            why=str(cause),
            next_step="see the generators' logs; raise rollout.sample_timeout_s if they are only slow",
        )

    def _taken(
        self,
        delivered: Sequence[pb.GeneratedSample],
        request: GenerationRequest,
        missing: dict[str, PartialSample],
        replica: Replica[GeneratorServiceAsyncStub],
        attempt: int,
    ) -> tuple[list[RolloutSample], Mismatch | None]:
        """Return the samples of one message that are whole, and why the last rejected one was rejected."""
        whole: list[RolloutSample] = []
        cause: Mismatch | None = None
        for sample in delivered:
            ended = sample.finish_reason != pb.FINISH_REASON_ABORT
            if not ended and not request.resume_partial:
                continue
            rejected = self.validator.reject_reason(sample, missing, request.min_version, replica.name)
            if rejected is not None:
                cause = rejected
            elif ended:
                partial = missing.pop(sample.sample_id)
                whole.append(partial.whole(sample, replica.name, replica.instance_id, attempt))
            else:
                most = request.sampling.max_response_tokens
                missing[sample.sample_id].add(sample, replica.instance_id, most)
        return whole, cause

    async def _with_texts(
        self, samples: list[RolloutSample], sampling: SamplingConfig
    ) -> list[RolloutSample]:
        """Set the texts of the samples of one message; a thread decodes many tokens, because they take a while."""
        sequences = [sample.token_ids.tolist() for sample in samples]
        decode = self._tokenizer.decode_many
        many = sum(map(len, sequences)) > DECODED_HERE
        texts = await asyncio.to_thread(decode, sequences) if many else decode(sequences)
        for sample, text in zip(samples, texts, strict=True):
            sample.text = sampling.shown(text)
        return samples

    async def _acquire(self, request: GenerationRequest, count: int) -> Replica[GeneratorServiceAsyncStub]:
        def allowed(replica: Replica[GeneratorServiceAsyncStub]) -> bool:
            # A replica that is named keeps its version outside of the weight group, and refuses any other version
            # itself.
            named = request.instance_id
            return (
                replica.instance_id == named
                if named
                else self._serves(replica.instance_id, request.min_version)
            )

        return await self._pool.acquire(
            self._load(request, count),
            allowed=allowed,
            timeout_s=self._wait_limit_s,
            what=f"a generator that serves version {request.min_version}",
            priority=request.priority,
            affinity=request.conversation,
        )

    @staticmethod
    def _load(request: GenerationRequest, count: int) -> Load:
        tokens = count * request.sampling.max_response_tokens + len(request.prompt_token_ids)
        return Load(tokens, places=count)

    async def _call(
        self,
        replica: Replica[GeneratorServiceAsyncStub],
        request: GenerationRequest,
        samples: Iterable[PartialSample],
        attempt: int,
    ) -> AsyncGenerator[Sequence[pb.GeneratedSample]]:
        sampling, gather = request.sampling, Duration()
        gather.FromNanoseconds(round(request.gather_s * 1e9))
        message = pb.GenerateRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            attempt=attempt,
            prompt_token_ids=to_tensor(request.prompt_token_ids),
            samples=[sample.slot(self._seed) for sample in samples],
            sampling=pb.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_response_tokens,
                min_tokens=sampling.min_response_tokens,
                stop_token_ids=sampling.stop_token_ids,
                stop=sampling.stop,
            ),
            min_version=request.min_version.to_proto(),
            priority=request.priority,
            gather=gather,
        )
        if len(message.samples) == 1 and self._shared.takes(replica):
            answer, waiting = await self._shared.generate(replica, message, request.timeout_s)
            self._pool.heard(replica, waiting)
            yield answer.samples
            return
        stream = rpc.server_stream(
            replica.stub.Generate, message, idle_timeout_s=request.timeout_s, timeout_s=request.timeout_s
        )
        async with aclosing(stream) as responses:
            async for response in responses:
                self._pool.heard(replica, response.waiting_samples)
                yield response.samples
