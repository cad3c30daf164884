"""Plays episodes on the environment service, for one run.

Invariants: one call is one episode, and leaving it ends the episode on the replica, too. A replica is lost when it is
silent while it is waited for, never because it is slow: it gives signs of life while an environment works. The world of
an episode is lost with its replica, so whoever plays it is told by `Unavailable`, and plays it again. An environment
that failed or took too long is an ending, never a score. Where the replica is well and the world of an episode is gone,
because another episode ended its worker, that is `FailedPrecondition`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_coordinator.rollouts.environment_limits import LONGEST_NAME, is_name
from flotilla_coordinator.rollouts.episode_messages import (
    Asked,
    Chat,
    Ended,
    WrittenTokens,
    asked_of,
    ended_of,
    message_of,
)
from flotilla_core import rpc
from flotilla_core.config import EnvironmentConfig
from flotilla_core.config.model import file_of_function
from flotilla_core.errors import (
    DeadlineExceeded,
    FlotillaError,
    Internal,
    Unavailable,
    unicode_text,
)
from flotilla_core.rpc import Load, Replica, ReplicaPool
from flotilla_core.tensors import to_tensor

if TYPE_CHECKING:
    from flotilla.common.v1.files_pb2 import FolderReference
    from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceAsyncStub

SILENT_S = 40.0
"""The time of several beats of a replica."""
LOOK_EVERY_S = 5.0
"""The time for which the file of the user's is taken to be as it was."""
EPISODE = Load(1)
LATE_S = 10.0
"""Two beats of a replica: the time after the limit of an episode in which it may tell that the episode was waiting."""
WAITS_S = 3600.0
"""The most time of waits that is left out: a server of somebody else's may say that it waits for ever."""
TIMEOUT = "timeout"
"""The ending of an episode whose environment took too long."""


@dataclass(frozen=True)
class EpisodeStart:
    """The beginning of an episode."""

    episode_id: str
    messages: Chat = ()
    answer: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attempt: int = 1


class OwnTime:
    """The time that the environment of one episode has left.

    Turns of the policy and waits on the replica, for a worker or a processor, are not in it: they say nothing about an
    episode, and grow with the load. The replica tells how long an episode has waited there, with all that it says.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._left_s = limit_s
        self._waited_s = 0.0
        """The waits that the replica has told so far."""
        self._waits_left_s = WAITS_S
        self._since = 0.0

    def begin(self) -> None:
        """Count from now on: the environment has to say something."""
        self._since = time.monotonic()

    def count(self, waited_s: float) -> bool:
        """Count what passed, but for waits, `waited_s` since the start of the episode; return whether too much has."""
        now = time.monotonic()
        passed_s = now - self._since
        waits_s = min(passed_s, max(0.0, waited_s - self._waited_s), self._waits_left_s)
        self._waits_left_s -= waits_s
        self._left_s -= passed_s - waits_s
        self._since, self._waited_s = now, waited_s
        return self._left_s < 0

    @property
    def most_s(self) -> float | None:
        """The time after which no word of the replica's can help any more; None: a silent one is lost before it."""
        most_s = self._left_s + LATE_S
        return most_s if most_s < SILENT_S else None


class EpisodeCall:
    """One episode that is played."""

    def __init__(
        self,
        responses: AsyncGenerator[pb.RunEpisodeResponse],
        say: Callable[[pb.RunEpisodeRequest], None],
        lost: Callable[[FlotillaError], None],
        limit_s: float,
    ) -> None:
        """`limit_s` is the environment's own time, all its answers together."""
        self._responses = responses
        self._say = say
        self._lost = lost
        self._time = OwnTime(limit_s)
        self._turns = 0
        self.ended: Ended | None = None

    async def asked(self) -> Asked | None:
        """Return the next turn that the environment asks for; None once the episode has ended."""
        if self.ended is not None:
            return None
        try:
            return await self._next()
        except TimeoutError:
            self.ended = Ended(TIMEOUT, {}, (), {}, str(self._late()))
        except (ValueError, RecursionError) as error:
            why = f"the environment said what cannot be read: {error}; see the limits in docs/environments.md"
            self.ended = Ended("error", {}, (), {}, why)
        except (Unavailable, DeadlineExceeded, Internal) as error:
            # A call that breaks while a turn is written is an internal error of gRPC (issue 36066).
            self._lost(error)
            raise Unavailable("the environment replica is lost", why=str(error)) from error
        return None

    async def _next(self) -> Asked | None:
        """Return the next turn that is asked for; raise TimeoutError where the environment took too long."""
        self._time.begin()
        async with asyncio.timeout(self._time.most_s) as clock:
            async for response in self._responses:
                is_late = self._time.count(response.waited.ToNanoseconds() / 1e9)
                part = response.WhichOneof("part")
                if part == "ended":
                    self.ended = ended_of(response.ended)
                    return None
                if is_late:
                    raise TimeoutError
                if part == "asked":
                    return asked_of(response.asked)
                if (most_s := self._time.most_s) is not None:
                    clock.reschedule(asyncio.get_running_loop().time() + most_s)
        raise Unavailable("the environment left the episode without an end")

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the environment took longer than {self._time.limit_s:g} s over one episode",
            why=f"it answered {self._turns} turns of the policy; their own time does not count, nor does a wait for a "
            f"worker or a processor, up to {WAITS_S / 3600:g} h",
            next_step="raise environment.episode_timeout_s, or lower environment.max_turns",
        )

    async def written(
        self,
        message: Mapping[str, Any],
        *,
        cut: bool = False,
        tokens: int = 0,
        tokens_left: int = 0,
        prompt_tokens: int = 0,
        unparsed: str = "",
        one_by_one: WrittenTokens | None = None,
    ) -> None:
        """Send what the policy wrote; `cut` says that it reached its most tokens, `unparsed` why a call is not read.

        `one_by_one` are its tokens, where they were asked for.
        """
        said = message_of(message)
        if not all(is_name(call.name) for call in said.tool_calls):
            del said.tool_calls[:]
            unparsed = (
                unparsed or f"the name of a call is longer than {LONGEST_NAME} characters, or not of one line"
            )
        written = pb.TurnWritten(
            message=said,
            finish=pb.TURN_FINISH_LENGTH if cut else pb.TURN_FINISH_STOP,
            tokens=tokens,
            tokens_left=tokens_left,
            prompt_tokens=prompt_tokens,
            unparsed=unicode_text(unparsed),
        )
        if one_by_one is not None:
            written.token_ids.CopyFrom(to_tensor(one_by_one.token_ids))
            written.logprobs.CopyFrom(to_tensor(one_by_one.logprobs))
            written.token_bytes.extend(one_by_one.texts)
        self._turns += 1
        self._say(pb.RunEpisodeRequest(written=written))

    async def stop(self, ending: str) -> Ended:
        """End an episode that gets no further turn, for `max_turns` or `no_room`; return its end."""
        number = pb.Ending.Value(f"ENDING_{ending.upper()}")
        self._say(pb.RunEpisodeRequest(stop=pb.EpisodeStop(ending=number)))
        if await self.asked() is not None:
            self.ended = Ended("error", {}, (), {}, "the environment asked for a turn after its stop")
        assert self.ended is not None, "no turn is asked for once it has ended"
        return self.ended


class Environments:
    """The environment of one run, on the replicas of the stack."""

    def __init__(
        self,
        run_id: str,
        environment: str,
        parameters: Mapping[str, Any],
        pool: ReplicaPool[EnvironmentServiceAsyncStub],
        wait_limit_s: float,
        *,
        trusted: bool = False,
        call_limit_s: float | None = None,
        episode_limit_s: float = math.inf,
        offer: Callable[[Path], FolderReference] | None = None,
    ) -> None:
        """`offer` gives a file of the user's to replicas on other hosts; None where all are on this one."""
        self._run_id = run_id
        self._pool = pool
        self._wait_limit_s = wait_limit_s
        self._call_limit_s = call_limit_s
        self._episode_limit_s = episode_limit_s
        self._offer = offer
        self._spec = pb.EnvironmentSpec(
            environment=environment, parameters=_struct(parameters), trusted=trusted
        )
        self._file = file_of_function(environment)
        self._looked_at = -math.inf

    @classmethod
    def of(
        cls,
        run_id: str,
        config: EnvironmentConfig,
        pool: ReplicaPool[EnvironmentServiceAsyncStub],
        wait_limit_s: float,
        offer: Callable[[Path], FolderReference] | None = None,
    ) -> Environments:
        """Return the environment that a run names."""
        return cls(
            run_id,
            config.name,
            config.parameters,
            pool,
            wait_limit_s,
            trusted=config.trusted,
            call_limit_s=config.call_timeout_s,
            episode_limit_s=config.episode_timeout_s,
            offer=offer,
        )

    @asynccontextmanager
    async def begin(self, start: EpisodeStart) -> AsyncIterator[EpisodeCall]:
        """Play an episode for as long as the block lasts."""
        parts: asyncio.Queue[pb.RunEpisodeRequest | None] = asyncio.Queue()
        parts.put_nowait(pb.RunEpisodeRequest(start=await self._start(start)))
        replica = await self._pool.acquire(
            EPISODE, timeout_s=self._wait_limit_s, what="an environment replica"
        )
        async with AsyncExitStack() as stack:
            stack.callback(self._pool.release, replica, EPISODE)
            stack.callback(parts.put_nowait, None)
            responses = rpc.duplex(replica.stub.RunEpisode, _all_of(parts), idle_timeout_s=SILENT_S)
            await stack.enter_async_context(aclosing(responses))
            yield EpisodeCall(
                responses, parts.put_nowait, lambda error: self._eject(replica, error), self._episode_limit_s
            )

    def _eject(self, replica: Replica[Any], error: FlotillaError) -> None:
        self._pool.eject(replica.instance_id, str(error))

    async def _start(self, start: EpisodeStart) -> pb.EpisodeStart:
        if (
            self._file is not None
            and self._offer is not None
            and time.monotonic() - self._looked_at >= LOOK_EVERY_S
        ):
            self._looked_at = time.monotonic()
            with suppress(FlotillaError):  # A replica that needs the file says what is wrong with it.
                self._spec.code.CopyFrom(await asyncio.to_thread(self._offer, self._file))
        return pb.EpisodeStart(
            run_id=self._run_id,
            episode_id=start.episode_id,
            attempt=start.attempt,
            environment=self._spec,
            messages=[message_of(message) for message in start.messages],
            answer=start.answer,
            info=_struct(start.info),
            seed=start.seed,
            call_limit=_duration(self._call_limit_s),
        )


async def _all_of(parts: asyncio.Queue[pb.RunEpisodeRequest | None]) -> AsyncIterator[pb.RunEpisodeRequest]:
    """Yield the parts up to None: gRPC waits for further ones even after the end of a call."""
    try:
        while (part := await parts.get()) is not None:
            yield part
    except asyncio.CancelledError:
        # It ends with its call. Where it raised, gRPC would write a traceback for each episode, which nobody reads.
        return


def _struct(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
