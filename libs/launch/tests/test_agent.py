"""Agents tend the rows of their nodes, follow what is wanted, and end in order; no Slurm is needed for that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import psutil
import pytest

from flotilla_core.addresses import ANY_ADDRESS, dialable, has_ipv6
from flotilla_core.config import StackConfig, dump_yaml
from flotilla_core.errors import FailedPrecondition, Unavailable
from flotilla_core.files import make_private_folder
from flotilla_launch.agent import Agent, read_endpoints
from flotilla_launch.child import Child
from flotilla_launch.slurm.job import SlurmNodes
from flotilla_launch.state import PlacedFile, read_json, write_json
from flotilla_launch.table import NATS
from flotilla_testing.credentials import credential

MARK = "1a2b"


class Placement:
    """A stack that is placed on nodes, whose agents run in this process."""

    def __init__(self, stacks, **values: object) -> None:
        self.stacks = stacks
        self.paths = stacks.paths()
        self.stack: StackConfig = stacks.config(
            bind={"host": "0.0.0.0"}, **{"reward": {"replicas": 1}, "trainer": {"replicas": 0}, **values}
        )
        self.paths.make()
        make_private_folder(self.paths.nodes)
        credential(self.paths.directory)
        self.paths.stack_file.write_text(dump_yaml(self.stack))
        self.placed = PlacedFile("slurm", MARK, {"generator": 1, "reward": 1}, str(stacks.executables))
        self.placed.write(self.paths.placed_file)

    def wants(self, **changes: object) -> None:
        self.placed = replace(self.placed, **changes)
        self.placed.write(self.paths.placed_file)

    def agent(self, node: str) -> Agent:
        return Agent(self.stack, self.paths, SlurmNodes(self.stack), node, MARK, self.stacks.executables)

    @contextlib.asynccontextmanager
    async def tended(self, *nodes: str) -> AsyncIterator[dict[str, asyncio.Task[int]]]:
        agents = {node: asyncio.create_task(self.agent(node).run()) for node in nodes}
        try:
            yield agents
        finally:
            self.wants(ended=list(nodes))
            await asyncio.wait(agents.values(), timeout=30)

    def states(self, node: str) -> dict[str, str]:
        told = read_json(self.paths.node_file(node)) or {"processes": []}
        return {one["name"]: one["state"].removeprefix("PROCESS_STATE_").lower() for one in told["processes"]}

    def pid(self, node: str) -> int:
        told = read_json(self.paths.node_file(node)) or {"processes": []}
        return next((int(one.get("pid", 0)) for one in told["processes"]), 0)

    async def ready(self, node: str, *names: str) -> None:
        await self.stacks.wait_for(
            f"{', '.join(names)} on {node}",
            lambda: self.states(node) == dict.fromkeys(names, "ready"),
            60.0,
        )


async def test_agents_start_the_rows_of_their_nodes_and_end_when_these_are_over(stacks) -> None:
    placement = Placement(stacks)
    async with placement.tended("head", "generator-0") as agents:
        await placement.ready("head", "nats", "coordinator", "reward-0")
        await placement.ready("generator-0", "generator-0")
        placement.wants(ended=["generator-0"])
        assert await asyncio.wait_for(agents["generator-0"], 30) == 0
        assert placement.states("generator-0") == {"generator-0": "stopped"}
        assert not agents["head"].done()
        placement.wants(ended=["generator-0", "head"])
        assert await asyncio.wait_for(agents["head"], 30) == 0
    assert stacks.processes() == set()


async def test_an_agent_that_is_cancelled_while_it_starts_begins_nothing_any_more(stacks) -> None:
    running = asyncio.create_task(Placement(stacks).agent("head").run())
    before = asyncio.all_tasks()
    await stacks.wait_for("its first process", stacks.processes, 30.0)
    running.cancel()
    await asyncio.wait({running}, timeout=30)
    assert stacks.processes() == set() and asyncio.all_tasks() <= before


async def test_nats_listens_where_other_nodes_reach_it(stacks) -> None:
    placement = Placement(stacks)
    async with placement.tended("head"):
        await placement.ready("head", "nats", "coordinator", "reward-0")
        endpoints = read_endpoints(placement.paths, MARK)
        url = urlsplit(endpoints.nats_url)
        assert url.hostname == dialable("0.0.0.0")
        assert urlsplit(endpoints.otlp).hostname == url.hostname
        listens = (placement.paths.nats / "nats.conf").read_text().partition("\n")[0]
        assert listens == f'host: "{ANY_ADDRESS[has_ipv6()]}"'
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.close()
        assert read_endpoints(placement.paths, "another") is None


async def test_replicas_of_a_node_come_and_go(stacks) -> None:
    placement = Placement(stacks)
    async with placement.tended("head"):
        await placement.ready("head", "nats", "coordinator", "reward-0")
        placement.wants(replicas={"generator": 1, "reward": 2})
        await placement.ready("head", "nats", "coordinator", "reward-0", "reward-1")
        placement.wants(replicas={"generator": 1, "reward": 0})
        await placement.ready("head", "nats", "coordinator")
        told = read_json(placement.paths.node_file("head"))["processes"]
        assert not any(process["name"].startswith("reward") for process in told)


async def test_a_placement_that_cannot_be_read_for_a_moment_ends_no_node(stacks) -> None:
    placement = Placement(stacks)
    agent = placement.agent("head")
    rows = agent.wanted()
    placement.paths.placed_file.write_text("{")
    assert rows and agent.wanted() == rows
    with pytest.raises(Unavailable, match="cannot be read"):
        placement.agent("head")
    placement.paths.placed_file.unlink()
    assert agent.wanted() == []


async def test_an_agent_whose_services_are_given_up_ends_with_1(stacks) -> None:
    stacks.behave(generator_0="die")
    placement = Placement(stacks)
    async with placement.tended("head", "generator-0") as agents:
        assert await asyncio.wait_for(agents["generator-0"], 60) == 1
        told = read_json(placement.paths.node_file("generator-0"))["processes"][0]
        assert told["state"] == "PROCESS_STATE_FAILED"
        assert "the model folder is empty" in told["error"]


async def test_an_agent_that_was_signalled_leaves_its_services_the_signal_that_they_have(
    stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals every process of a step: a second signal from the agent would cut their draining short."""
    placement = Placement(stacks)
    agent = placement.agent("head")
    running = asyncio.create_task(agent.run())
    await placement.ready("head", "nats", "coordinator", "reward-0")
    signalled: list[Child] = []
    monkeypatch.setattr(Child, "signal", lambda child, _: signalled.append(child))
    for process in read_json(placement.paths.node_file("head"))["processes"]:
        if process["name"] != NATS:
            os.kill(int(process["pid"]), signal.SIGTERM)
    agent.end()
    assert await asyncio.wait_for(running, 30) == 0
    assert signalled == []
    assert stacks.processes() == set()


async def test_the_agent_of_a_placement_that_is_over_starts_nothing(stacks) -> None:
    placement = Placement(stacks)
    placement.wants(mark="of another placement")
    with pytest.raises(FailedPrecondition, match="no service of this placement"):
        await placement.agent("head").run()


async def test_services_start_anew_when_the_head_has_moved_to_another_host(stacks) -> None:
    placement = Placement(stacks)
    moved = {"mark": MARK, "nats_url": "tls://192.0.2.9:1", "otlp": "https://192.0.2.9:2"}
    async with placement.tended("head", "generator-0"):
        await placement.ready("generator-0", "generator-0")
        before = placement.pid("generator-0")
        write_json(placement.paths.endpoints_file, moved)
        await stacks.wait_for("another process", lambda: placement.pid("generator-0") not in (0, before))
        await placement.ready("generator-0", "generator-0")
        words = psutil.Process(placement.pid("generator-0")).cmdline()
        assert words[words.index("--nats") + 1] == moved["nats_url"]
        assert words[words.index("--otlp") + 1] == moved["otlp"]


async def test_a_head_on_another_host_takes_addresses_of_its_own(stacks) -> None:
    placement = Placement(stacks)
    write_json(
        placement.paths.endpoints_file,
        {"mark": MARK, "nats_url": "tls://192.0.2.9:1", "otlp": "https://192.0.2.9:2"},
    )
    async with placement.tended("head"):
        await placement.ready("head", "nats", "coordinator", "reward-0")
        endpoints = read_endpoints(placement.paths, MARK)
        assert urlsplit(endpoints.nats_url).hostname == dialable("0.0.0.0")
        assert urlsplit(endpoints.otlp).hostname == dialable("0.0.0.0")
