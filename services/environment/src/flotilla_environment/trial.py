"""Plays one episode in a process of its own that needs no fleet: how a user tries an environment.

Run as `python -m flotilla_environment.trial ISOLATION`, a section of the stack as JSON. Each line of standard input is
a `RunEpisodeRequest` as JSON, each of standard output a `RunEpisodeResponse`. It plays as the service does, in a worker
that is killed at its limits. An error of the call is the last line, a `Finding`, with exit code REFUSED. Standard error
has the level of the jail of user code, and what such code prints. Run as `python -m flotilla_environment.trial list` it
prints a `ListEnvironmentsResponse` as JSON, with the environments that are installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TextIO

from google.protobuf.json_format import MessageToJson, Parse

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.config import EnvironmentServiceConfig, IsolationConfig
from flotilla_core.config.run import AGENT
from flotilla_core.errors import FlotillaError
from flotilla_environment import catalog
from flotilla_environment.episode import play
from flotilla_environment.stage import Stage
from flotilla_workers.jail.level import Level, told

REFUSED = 3
LIST = "list"


async def _parts() -> AsyncIterator[pb.RunEpisodeRequest]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield Parse(line, pb.RunEpisodeRequest())


async def _played(results: TextIO) -> None:
    isolation = IsolationConfig.model_validate_json(sys.argv[1])
    stage, parts = Stage(EnvironmentServiceConfig(workers=1, isolation=isolation)), _parts()
    await stage.start()
    try:
        start = (await anext(parts)).start
        if ".py:" in (own := start.environment).environment or own.environment == AGENT:
            level = str(Level.NONE) if own.trusted else stage.holders.jail.isolation
            sys.stderr.write(f"{told(level)}\n")
            sys.stderr.flush()
        episode = stage.episode(start)
        async with aclosing(play(episode, parts)) as responses:
            async for response in responses:
                print(MessageToJson(response, indent=None), file=results, flush=True)
        await episode.close()
    finally:
        await stage.stop()


def main() -> int:
    """Play the episode of standard input, or list the environments."""
    # What user code and its worker print must not come between.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1] == LIST:
        known = pb.ListEnvironmentsResponse(environments=catalog.list_environments())
        print(MessageToJson(known, indent=None), file=results, flush=True)
        return 0
    try:
        asyncio.run(_played(results))
    except FlotillaError as error:
        print(MessageToJson(error.finding(), indent=None), file=results, flush=True)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
