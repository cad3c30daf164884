"""The seam between the service and whatever samples tokens.

Invariants: an engine validates nothing that `read_request` or `WeightSession` already did, and knows nothing of gRPC;
every sample that `generate` was asked for is yielded exactly once, whole or partial (`ABORT`), unless the iterator is
closed, which ends its requests in the engine. Weight calls are serialised by `WeightSession`; `apply` is the only one
that changes live weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import WeightGroupFailed, WeightsMismatch
from flotilla_core.version import Version
from flotilla_weights.manifest import Manifest


class FinishReason(Enum):
    """The reason why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class KvPolicy(Enum):
    """The effect of a commit on the KV cache of running samples."""

    RECOMPUTE = "recompute"
    REUSE = "reuse"
    DRAIN = "drain"


@dataclass(frozen=True)
class Sampling:
    """The sampling of tokens; off is None or 0."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def after(self, written: int) -> Sampling:
        """For the rest of a response that has so many tokens."""
        return replace(
            self, max_tokens=self.max_tokens - written, min_tokens=max(0, self.min_tokens - written)
        )


@dataclass(frozen=True)
class SampleSlot:
    """One sample to draw."""

    sample_id: str
    seed: int
    prefix: tuple[int, ...] = ()
    """Tokens that it has from before; the new ones alone are delivered."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the samples to draw from it."""

    request_id: str
    prompt: Sequence[int]
    samples: tuple[SampleSlot, ...]
    sampling: Sampling
    cache_salt: str | None = None
    priority: int = 0
    """Lower ones come first where samples wait."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) that one version wrote; no version before the first commit."""

    version: Version | None
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """A sample that ended."""

    sample_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class EngineInfo:
    """The properties of an engine that do not change while it runs."""

    max_model_tokens: int
    vocabulary_size: int
    weight_workers: int
    gpus: int = 0
    reads_text: bool = False
    """True where samples can end at a text."""
    required_tensors: dict[str, tuple[int, ...]] | None = None
    """Names and shapes that a sync must bring, from the checkpoint it was booted with; None takes any manifest."""
    can_sleep: bool = False
    """True where it was started so that the memory of its KV cache can be given back."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """The content of staging: one digest per tensor, in manifest order, for each worker."""

    worker_digests: tuple[tuple[int, ...], ...]
    in_place: bool = False
    """True where it was written to the live weights, so that nothing may decode before its commit."""


@dataclass(frozen=True)
class Applied:
    """The cost of a commit."""

    stall_s: float
    apply_s: float
    verify_s: float


@dataclass(frozen=True)
class Verified:
    """The result of a look at the memory that decodes, where nothing was found wrong."""

    tensors: int
    """The number of tensors that were compared on every worker."""
    unchecked: str = ""
    """The reason why none were compared."""


class WeightsNotLive(WeightsMismatch):
    """Applying failed half-way: the live weights are unknown and nothing may decode with them."""


class WeightsHalfWritten(WeightGroupFailed):
    """A transfer into the live weights broke off: nothing may decode with them until a whole version is live."""


class Engine(ABC):
    """One model replica."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """Known once `start` has returned."""

    @abstractmethod
    async def start(self) -> None:
        """Load and warm up: the next request is served at full speed."""

    @abstractmethod
    async def stop(self) -> None:
        """Free everything: processes, memory, sockets."""

    @abstractmethod
    async def wait_failed(self) -> str:
        """Wait until the engine can serve no more, and say why."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        """Samples in the order in which they end; those that end together come together."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> int:
        """End requests early; their iterators yield what they have. Returns the samples cut."""

    @abstractmethod
    async def worker_stacks(self) -> list[tuple[str, int, str]]:
        """Name, process id and stacks of each worker process that answers in time."""

    @property
    @abstractmethod
    def waiting_samples(self) -> int:
        """The number of samples that wait for a place; read for every answer."""

    @abstractmethod
    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        """Enter a weight group with all workers. Cancelling leaves it."""

    @abstractmethod
    async def receive(self, progress: Callable[[int], None], kv_policy: KvPolicy) -> Received:
        """Stage one publication; `progress` receives the count of buckets. Cancelling drops the publication.

        An engine that receives in place pauses by the policy of the commit to come, and stays so until that commit.
        """

    @abstractmethod
    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        """Make the staged weights live and tag `version`.

        WeightsNotLive says that the live weights are broken; any other error, that they are untouched.
        """

    @abstractmethod
    async def verify(self) -> Verified:
        """Compare the live weights with what the last commit put there, beside decoding.

        WeightsNotLive says that they changed since; then nothing decodes any more.
        """

    @abstractmethod
    async def tag(self, version: Version | None) -> None:
        """Record which version the live weights are; None where another run took the replica over."""

    @abstractmethod
    async def drop(self) -> bool:
        """Forget staged tensors and leave the group; return whether the live weights are no version any more."""

    @abstractmethod
    async def sleep(self) -> int:
        """Stop all samples, forget their KV, give its GPU memory back, and return the bytes; the weights stay.

        Samples, and those that are asked for meanwhile, continue after `wake`, which also repairs what an error here
        left half done. Nothing about weights is asked of the engine before.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Take the memory again and decode; Exhausted says that others have it, and that this can be repeated."""
