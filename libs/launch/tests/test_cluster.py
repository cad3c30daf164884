"""The launcher of a cluster believes agents whose units live, and remembers nothing that it cannot end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flotilla.launcher.v1.launcher_pb2 import ProcessState
from flotilla_core.config import StackConfig, dump_yaml, load
from flotilla_core.errors import FailedPrecondition
from flotilla_core.files import make_private_folder
from flotilla_launch.cluster import Cluster, Unit
from flotilla_launch.launcher import launcher_for
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import PlacedStack
from flotilla_launch.ray.nodes import RayNodes, check
from flotilla_launch.state import PlacedFile, write_json
from flotilla_launch.table import Nodes, Row

READY, STARTING = ProcessState.PROCESS_STATE_READY, ProcessState.PROCESS_STATE_STARTING


class Machines:
    """A scheduler whose units are entries of a list; agents are what a test writes."""

    name = "machines"
    listing = "machines"

    def __init__(self, paths: StackPaths) -> None:
        self.paths = paths
        self.there: dict[str, Unit] = {}
        self.ended: list[str] = []
        self.dies = ""

    def check(self, stack: StackConfig) -> None:
        check(stack)

    def nodes(self, stack: StackConfig) -> Nodes:
        return RayNodes(stack)

    async def start(
        self, stack: StackConfig, placed: PlacedFile, table: Sequence[Row], nodes: Sequence[str]
    ) -> None:
        for node in nodes:
            lives = node != self.dies
            state = "running" if lives else "ModuleNotFoundError"
            self.there[node] = Unit(node, node, f"unit {node}", state, lives, place="m1", holds=True)

    async def units(self, placed: PlacedFile) -> dict[str, Unit]:
        return dict(self.there)

    async def end(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.ended.append(unit.node)
            del self.there[unit.node]


@pytest.fixture
def machines(stacks) -> Machines:
    return Machines(stacks.paths())


def small(stacks) -> StackConfig:
    return stacks.config(bind={"host": "0.0.0.0"}, trainer={"replicas": 0}, generator={"engine": "sim"})


async def test_what_an_agent_told_elsewhere_is_not_believed(stacks, machines: Machines) -> None:
    paths = machines.paths
    paths.make()
    make_private_folder(paths.nodes)
    paths.stack_file.write_text(dump_yaml(small(stacks)))
    PlacedFile("machines", "m", {"generator": 1, "reward": 0}, "/bin").write(paths.placed_file)
    process = {"name": "generator-0", "kind": "SERVICE_KIND_GENERATOR", "state": "PROCESS_STATE_READY"}
    write_json(paths.node_file("generator-0"), {"mark": "m", "place": "m1", "processes": [process]})
    unit = Unit("generator-0", "1", "unit 1", "running", lives=True, place="m1", holds=True)
    for now, expected in (
        (unit, READY),
        (replace(unit, place="m2"), STARTING),
        (replace(unit, place="", waits="no machine"), STARTING),
    ):
        machines.there["generator-0"] = now
        listed = (await PlacedStack(paths, Cluster(paths, machines)).state()).processes
        assert {one.state for one in listed if one.name == "generator-0"} == {expected}


async def test_the_last_words_of_an_agent_that_gave_up_outlive_its_unit(stacks, machines: Machines) -> None:
    launcher = spread(stacks, machines)
    unit = machines.there["generator-0"]
    failed = {"name": "generator-0", "state": "PROCESS_STATE_FAILED", "error": "no such secret"}
    told = {"mark": "m", "place": "m1", "processes": [failed]}
    write_json(machines.paths.node_file("generator-0"), told)
    machines.there["generator-0"] = replace(unit, state="ending", lives=False, place="")
    (found,) = [one for one in (await launcher.state()).processes if one.name == "generator-0"]
    assert (found.state, found.error) == (ProcessState.PROCESS_STATE_FAILED, "no such secret")


async def test_a_unit_that_dies_while_the_stack_comes_up_ends_the_start_with_its_reason(
    stacks, machines: Machines
) -> None:
    machines.dies = "generator-0"
    launcher = PlacedStack(machines.paths, Cluster(machines.paths, machines))
    waits: list[str] = []
    machines_waiting = machines.start

    async def start(*arguments: object) -> None:
        await machines_waiting(*arguments)
        machines.there["head"] = replace(machines.there["head"], waits="no machine has 1 CPU free")

    machines.start = start
    with pytest.raises(FailedPrecondition, match=r"generator-0 did not start(.|\n)*ModuleNotFoundError"):
        await launcher.place(small(stacks), on_progress=lambda _: None, on_wait=waits.append)
    assert "unit head waits: no machine has 1 CPU free" in waits
    assert machines.there == {}
    assert not machines.paths.placed_file.exists()


async def test_without_ray_a_stack_on_ray_is_refused_and_nothing_is_remembered(
    stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    paths = stacks.paths()
    launcher = launcher_for("ray", paths)
    with pytest.raises(FailedPrecondition, match="Ray is not installed") as caught:
        await launcher.place(small(stacks), on_progress=lambda _: None, on_wait=lambda _: None)
    assert "requirements/ray.txt" in caught.value.next_step
    assert not paths.placed_file.exists()


HOSTS = {"nproc": 2, "hosts": [{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1}]}


def spread(stacks, machines: Machines) -> PlacedStack:
    """A launcher whose machines all have their agents, which tell what they run and end when they shall."""
    paths = machines.paths
    paths.make()
    make_private_folder(paths.nodes)
    config = stacks.config(bind={"host": "0.0.0.0"}, trainer=HOSTS, generator={"engine": "sim"})
    paths.stack_file.write_text(dump_yaml(config))
    PlacedFile("machines", "m", {"generator": 1, "reward": 0}, "/bin").write(paths.placed_file)
    for node in ("head", "generator-0", "trainer", "trainer-at-b"):
        machines.there[node] = Unit(node, node, f"unit {node}", "running", lives=True, place="m1", holds=True)
        agents_tell(machines, node)
    return PlacedStack(paths, Cluster(paths, machines))


def agents_tell(machines: Machines, node: str) -> None:
    """The agent of a node tells that its services are ready."""
    kinds = {"trainer-at-b": "RANKS", "trainer": "TRAINER", "generator-0": "GENERATOR", "head": "COORDINATOR"}
    names = ["nats", "coordinator"] if node == "head" else [node]
    processes = [
        {"name": name, "state": "PROCESS_STATE_READY"}
        | ({} if name == "nats" else {"kind": f"SERVICE_KIND_{kinds[node]}"})
        for name in names
    ]
    write_json(machines.paths.node_file(node), {"mark": "m", "place": "m1", "processes": processes})


async def test_an_agent_of_a_gang_that_was_lost_is_placed_alone_and_a_lost_gang_together(
    stacks, machines: Machines
) -> None:
    launcher = spread(stacks, machines)
    asked: list[list[str]] = []
    begin = machines.start

    async def start(
        stack: StackConfig, placed: PlacedFile, table: Sequence[Row], nodes: Sequence[str]
    ) -> None:
        asked.append([*nodes])
        await begin(stack, placed, table, nodes)
        for node in nodes:
            agents_tell(machines, node)

    machines.start = start
    config = load(StackConfig, [machines.paths.stack_file])
    for lost in (["trainer-at-b"], ["trainer", "trainer-at-b"]):
        for node in lost:
            del machines.there[node]
        listed = {one.name: one for one in (await launcher.state()).processes}
        assert all("flotilla up places it again" in listed[node].error for node in lost)
        placed = await launcher.place(config, on_progress=lambda _: None, on_wait=lambda _: None)
        assert placed.changed
        assert asked.pop() == lost
    assert {one.state for one in placed.processes} == {READY}


async def test_a_front_ends_before_the_agents_of_its_gang(stacks, machines: Machines) -> None:
    launcher = spread(stacks, machines)
    look, ended = machines.units, []

    async def units(placed: PlacedFile) -> dict[str, Unit]:
        now = PlacedFile.read(machines.paths.placed_file)
        for node in now.ended if now else []:
            if machines.there.pop(node, None) is not None:
                ended.append(node)
        return await look(placed)

    machines.units = units
    assert await launcher.down(on_wait=lambda _: None)
    assert ended == ["generator-0", "trainer", "trainer-at-b", "head"]
    assert machines.ended == [], "none was ended by force"
