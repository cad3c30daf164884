"""Plays the episodes of a replica: in workers that hold environments, by the service itself, or by agents."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.config import EnvironmentServiceConfig
from flotilla_core.config.run import AGENT
from flotilla_environment import catalog
from flotilla_environment.agents.agents import Agents
from flotilla_environment.agents.episode import AgentEpisode
from flotilla_environment.builtin import BUILTIN
from flotilla_environment.episode import Episode, Played
from flotilla_environment.holders import Holders
from flotilla_environment.hosted import HostedEnvironment
from flotilla_environment.hosted_episode import HostedEpisode
from flotilla_workers.jail.jail import find


class Stage:
    """All that plays episodes."""

    def __init__(self, config: EnvironmentServiceConfig) -> None:
        self.holders = Holders(config.workers, partial(find, config.isolation, "environment"))
        self.agents = Agents(config.gateway, lambda: self.holders.jail)

    async def start(self) -> None:
        """Look what jail this host has, and let agents in that come by themselves; all else starts with an episode."""
        await self.holders.start()
        await self.agents.start()

    def episode(self, start: pb.EpisodeStart, code: Path | None = None) -> Played[Any]:
        """Return an episode; `code` is where the file of its class is on this host."""
        if start.environment.environment == AGENT:
            return AgentEpisode(start, self.agents)
        target = catalog.resolve(start.environment, code)
        kind = BUILTIN[target.source] if target.kind == "builtin" else None
        if kind is not None and issubclass(kind, HostedEnvironment):
            return HostedEpisode(
                start, target, kind, self.holders.place(start.run_id, trusted=target.trusted)
            )
        return Episode(start, target, self.holders)

    async def stop(self) -> None:
        """End all of it."""
        await self.agents.stop()
        await self.holders.stop()
