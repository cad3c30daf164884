"""Rewards that harm: what a run does to its workers is never felt by another run. `make test-chaos` has every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hostile_runs import LIMIT_S, WORKERS, Neighbours, neighbours_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOME = (
    "fork_returns",
    "fork_returns_another_number",
    "fork_whose_parent_exits",
    "fork_of_libc",
    "daemon",
    "writes_three_frames",
    "knows_the_secret_and_answers_twice",
    "knows_the_secret_and_nests",
    "thread_writes_later",
    "closes_every_descriptor",
    "kills_its_parent",
    "stops_itself",
    "replaces_the_worker",
    "raises_half_a_pair",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbours(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Neighbours]:
    async with neighbours_in(tmp_path_factory.mktemp("hostile")) as neighbours:
        yield neighbours


@pytest.mark.parametrize("kind", SOME)
async def test_a_hostile_reward_is_felt_by_no_other_run(neighbours: Neighbours, kind: str) -> None:
    await neighbours.assert_felt_by_no_other_run(kind)


async def test_what_rewards_left_behind_ends_when_another_run_needs_the_place(neighbours: Neighbours) -> None:
    await neighbours.struck("spawned_shell_stays")
    assert neighbours.left()
    async with asyncio.timeout(LIMIT_S):
        while neighbours.left():
            await neighbours.others()


async def test_what_a_worker_started_ends_though_its_keeper_was_killed(neighbours: Neighbours) -> None:
    await neighbours.struck("kills_its_parent_beside_its_child")
    assert list((neighbours.folder / "left").iterdir())
    async with asyncio.timeout(LIMIT_S):
        while neighbours.left():
            await asyncio.sleep(0.02)


async def test_a_worker_serves_one_run_and_one_file_and_runs_that_alternate_keep_theirs(
    neighbours: Neighbours,
) -> None:
    asked = [("a", "one"), ("b", "one"), ("a", "two")]
    pids: dict[tuple[str, str], set[float]] = {one: set() for one in asked}
    for _ in range(3):
        for run_id, file in asked:
            pids[run_id, file] |= set(await neighbours.processes_of(f"alternating-{run_id}", file))
    assert len(set.union(*pids.values())) == sum(len(found) for found in pids.values())
    assert all(len(found) <= WORKERS for found in pids.values())
