"""What the loop of an episode and the client of the environment service say to each other, in plain Python.

Invariants: messages and tools have the form that chat templates take. Whoever is lost raises Unavailable or
DeadlineExceeded; an environment that fails ends its episode with a failure.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger.records import Ending


@dataclass(frozen=True)
class EpisodeStart:
    """What an environment begins an episode with."""

    episode_id: str
    attempt: int
    """The number of beginnings of this episode before this one."""
    messages: list[dict[str, Any]]
    """The prompt of the data set."""
    answer: str
    info: dict[str, Any]
    seed: int
    """The seed of what the environment draws, one for all episodes of a group."""


@dataclass(frozen=True)
class Asked:
    """A turn that the environment asks for."""

    messages: list[dict[str, Any]]
    """What was said since the last turn of the thread, or the whole history where it is afresh."""
    tools: list[dict[str, Any]] | None = None
    thread: str = ""
    afresh: bool = False
    max_tokens: int = 0
    """The most tokens of the turn where the environment wants fewer than the run allows; 0 takes those of the run."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How an episode ended, by what its environment says."""

    ending: Ending
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Finding | None = None


class EpisodeCall(Protocol):
    """An episode under way."""

    ended: Ended | None
    """How it ended; None before that."""

    async def asked(self) -> Asked | None:
        """Return the next turn that the environment asks for; None once the episode has ended."""

    async def written(
        self, message: dict[str, Any], *, cut: bool, tokens: int, tokens_left: int, unparsed: str
    ) -> None:
        """Answer with a turn; `cut` where it reached its most tokens."""

    async def stop(self, ending: Ending) -> None:
        """Answer that there is no further turn; the environment ends the episode with its rewards."""


class Environments(Protocol):
    """The environment service, as one run uses it."""

    def begin(self, start: EpisodeStart) -> AbstractAsyncContextManager[EpisodeCall]:
        """Begin an episode; what it holds is freed at the exit."""
