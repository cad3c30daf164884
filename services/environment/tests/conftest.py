"""Episodes that a test plays to their end, as the service does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from played_episodes import Played, play_episode

from flotilla_core.config import EnvironmentServiceConfig
from flotilla_environment.holders import Holders
from flotilla_environment.stage import Stage
from flotilla_workers.jail.jail import Jail, find
from flotilla_workers.jail.level import Level

Play = Callable[..., Awaitable[Played]]


@pytest.fixture(scope="session")
def host_jail() -> Jail:
    """The jail of this host, which also shows the folder of these tests."""
    return replace(find(None, "environment"), readable=(Path(__file__).parent,))


@pytest.fixture
def namespaces(host_jail: Jail) -> Jail:
    if host_jail.level is not Level.NAMESPACES:
        pytest.skip("this host makes no namespaces")
    return host_jail


@pytest_asyncio.fixture
async def stage(host_jail: Jail) -> AsyncIterator[Stage]:
    if host_jail.refusal:
        pytest.skip(host_jail.refusal)
    kept = Stage(EnvironmentServiceConfig(workers=2))
    kept.holders.jail = host_jail
    yield kept
    await kept.stop()


@pytest.fixture
def holders(stage: Stage) -> Holders:
    return stage.holders


@pytest.fixture
def played(stage: Stage) -> Play:
    return partial(play_episode, stage)
