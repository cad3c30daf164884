"""Episodes of environments that the service plays itself, because they wait for others: servers, and rooms.

Invariants: each waits for itself, so none keeps another one waiting. What an environment says is checked as that of a
worker is. Whatever an episode holds is freed at its end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_environment.episode import STOPS, limit_of, task_of, turn_of, with_waits
from flotilla_environment.holders import Said, read
from flotilla_environment.hosted import HostedEnvironment
from flotilla_environment.rooms import RoomLost
from flotilla_environment.servers import Place
from flotilla_environment.waits import Waits
from flotilla_environment.worker import Episodes
from flotilla_workers.functions import Refusal, Target, described
from flotilla_workers.process import Failure, Timeout

OURS = (str(Path(__file__).parent),)


class HostedEpisode:
    """An episode that the service plays itself."""

    late = "raise environment.call_timeout_s, or see why its servers take so long"

    def __init__(
        self, start: pb.EpisodeStart, target: Target, kind: type[HostedEnvironment], place: Place
    ) -> None:
        self.name = start.environment.environment
        self.waits = Waits()
        self._start = start
        self._limit_s = limit_of(start)
        self._parameters = target.parameters
        self._kind, self._place = kind, place
        self._episodes = Episodes(self._made, {})

    def _made(self) -> HostedEnvironment:
        try:
            environment = self._kind(**self._parameters)
        except (TypeError, ValueError, Refusal) as error:
            raise InvalidConfig(
                "the environment cannot be loaded", where=self.name, why=str(error)
            ) from error
        environment.place = self._place
        return environment

    async def begin(self) -> Said | Failure | Timeout:
        self.waits.begin()
        async with self._place.rooms.beginnings.place(self._place.run_id):
            self.waits.end()
            return await self._ask("begin", task=task_of(self._start))

    async def reply(self, written: pb.TurnWritten) -> Said | Failure | Timeout:
        return await self._ask("reply", turn=turn_of(written))

    async def stop(self, ending: pb.Ending.ValueType) -> Said | Failure | Timeout:
        return await self._ask("stop", ending=STOPS[ending])

    async def _ask(self, do: str, **question: Any) -> Said | Failure | Timeout:
        """Return what the environment says to one more question."""
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                return read(await self._episodes.answer({"do": do, "episode": 0, **question}))
        except TimeoutError as error:
            return Timeout(self._limit_s) if limit.expired() else _failure(error)
        except (Refusal, RoomLost) as error:
            return Failure(str(error))
        except FlotillaError:
            raise
        except Exception as error:  # noqa: BLE001 - what went wrong is told, and is no reward
            return _failure(error)

    def metrics(self, said: Said) -> dict[str, float]:
        """Return the numbers of an episode at its end."""
        return said.metrics

    def says(self, **part: Any) -> pb.RunEpisodeResponse:
        """Return a response, with the time that the episode has waited."""
        return with_waits(self.waits, **part)

    async def close(self) -> None:
        """Free what the episode holds."""
        with suppress(Exception):  # Nobody hears of it.
            await self._episodes.close(0)


def _failure(error: BaseException) -> Failure:
    said = described(error, OURS)
    return Failure(f"{type(error).__name__}: {error}", said["traceback"])
