"""Rewards that harm: what a run does to its workers is never felt by another run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hostile_runs import KINDS, Neighbours, neighbours_in

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbours(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Neighbours]:
    async with neighbours_in(tmp_path_factory.mktemp("hostile")) as neighbours:
        yield neighbours


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hostile_reward_is_felt_by_no_other_run(neighbours: Neighbours, kind: str) -> None:
    await neighbours.assert_felt_by_no_other_run(kind)
