"""Workers that several runs share: who gets the next one."""

from __future__ import annotations

import asyncio
from collections import Counter

from flotilla_workers.pool import FairShare


class Bench:
    """Jobs that take a place each and keep it until they are told to end."""

    def __init__(self, places: int) -> None:
        self.fair_share: FairShare[int] = FairShare()
        for place in range(places):
            self.fair_share.add(place)
        self.working: list[tuple[str, asyncio.Event]] = []
        self.begun: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, run_id: str, jobs: int) -> None:
        self.tasks += [asyncio.create_task(self._job(run_id)) for _ in range(jobs)]
        await self.settle()

    async def end(self, run_id: str) -> None:
        """The oldest job of a run is done."""
        _, done = next(one for one in self.working if one[0] == run_id)
        done.set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def has(self) -> Counter[str]:
        return Counter(run_id for run_id, _ in self.working)

    async def _job(self, run_id: str) -> None:
        async with self.fair_share.place(run_id):
            mine = (run_id, asyncio.Event())
            self.working.append(mine)
            self.begun.append(run_id)
            try:
                await mine[1].wait()
            finally:
                self.working.remove(mine)


async def test_a_run_that_is_alone_has_all_workers_and_gives_up_half_as_they_become_free() -> None:
    bench = Bench(4)
    await bench.ask("first", 20)
    assert bench.has == {"first": 4}
    await bench.ask("second", 20)
    for _ in range(2):
        await bench.end("first")
    assert bench.has == {"first": 2, "second": 2}
    for run_id in ("first", "second", "second", "first", "second"):
        await bench.end(run_id)
        assert max(bench.has.values()) <= 3
    bench.begun.clear()
    for _ in range(8):
        await bench.end(bench.working[0][0])
    assert bench.has == {"first": 2, "second": 2} and Counter(bench.begun) == {"first": 4, "second": 4}


async def test_a_run_whose_items_are_done_leaves_its_workers_to_the_others() -> None:
    bench = Bench(4)
    await bench.ask("first", 4)
    await bench.ask("second", 8)
    for _ in range(4):
        await bench.end("first")
    assert bench.has == {"second": 4}


async def test_whoever_goes_away_while_it_waits_costs_nobody_a_worker() -> None:
    bench = Bench(1)
    await bench.ask("first", 1)
    await bench.ask("second", 2)
    waiting = bench.tasks[1]
    waiting.cancel()
    bench.working[0][1].set()
    await bench.settle()
    assert bench.has == {"second": 1}
    await bench.ask("third", 1)
    # The place is handed over in the moment in which its taker goes away.
    bench.working[0][1].set()
    await asyncio.sleep(0)
    bench.tasks[-1].cancel()
    await bench.settle()
    await bench.ask("fourth", 1)
    assert bench.has == {"fourth": 1}
    await bench.end("fourth")
    assert not bench.has


async def test_a_free_place_that_suits_is_taken_before_the_one_that_is_warm() -> None:
    bench = Bench(3)
    async with (
        bench.fair_share.place("run", lambda place: place == 2) as first,
        bench.fair_share.place("run") as second,
    ):
        assert (first, second) == (2, 1)
    async with bench.fair_share.place("run") as third:
        assert third == 2
