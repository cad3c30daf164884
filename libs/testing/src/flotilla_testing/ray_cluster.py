"""A real Ray cluster on this host: one raylet a node, each with the resources that a test gives it.

Invariant: the store of each node is small, and the processes of the cluster end with its context.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import psutil

from flotilla_core.config import StackConfig, load
from flotilla_launch.ray.nodes import RayNodes
from flotilla_testing.stack import Stack, wait_until

NOTICES_S = 90.0
"""Ray's own health check: five failures, three seconds apart. Each takes up to ten seconds where nobody answers, and
none where the port is closed, so Ray misses a machine after 12 to 65 s. The rest is for a host that is busy."""
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}


def reason_to_skip() -> str:
    """Return what keeps a cluster from starting here; empty where nothing does."""
    try:
        found = importlib.util.find_spec("ray.cluster_utils")
    except ImportError:
        found = None
    return "" if found is not None else "no Ray: make test-ray"


class RayCluster:
    """A cluster that runs, as Ray itself shows it."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, **resources: Any) -> Any:
        """Add a machine."""
        node = self._cluster.add_node(**SMALL, **_with_shares(resources))
        self._cluster.wait_for_nodes()
        return node

    def kill(self, node: Any) -> None:
        """Lose a machine without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def wait_until_missed(self, node: Any) -> None:
        """Wait until Ray knows that a machine is lost, which no test of ours can hasten."""
        import ray

        def missed() -> bool:
            return all(one["NodeID"] != node.node_id or not one["Alive"] for one in ray.nodes())

        wait_until("Ray to notice that a machine is lost", missed, NOTICES_S)

    def kill_all(self, node: Any) -> int:
        """Kill all processes of a machine at once, those of the stack among them; return how many there were."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        held = [raylet, *raylet.children(recursive=True)]
        for process in held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill(node)
        return len(held)

    def hold(self, **resources: float) -> Any:
        """Take resources away from everybody else; the group that holds them."""
        import ray

        group = ray.util.placement_group([resources])
        ray.get(group.ready(), timeout=30)
        return group

    def give(self, group: Any) -> None:
        import ray

        ray.util.remove_placement_group(group)

    def held(self, stack: Stack) -> dict[str, tuple[dict[str, float], str]]:
        """Return what is set aside for each node of the table, and the machine by Ray's id, where it is on one."""
        import ray

        known, found = RayNodes(load(StackConfig, [stack.file])), {}
        for group in ray.util.placement_group_table().values():
            if group["name"].startswith(f"flotilla-{stack.directory.name}-") and group["state"] != "REMOVED":
                for index, node in enumerate(known.gang(group["name"].partition(".")[2])):
                    machine = (
                        group["bundles_to_node_id"].get(index, "") if group["state"] != "PENDING" else ""
                    )
                    found[node] = group["bundles"][index], machine
        return found

    def actors(self, stack: Stack) -> list[str]:
        """Return the nodes of the stack's table that have an actor."""
        import ray

        namespace = f"flotilla-{stack.directory.name}"
        named = ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"].partition(".")[2] for one in named if one["namespace"] == namespace)

    def machine(self, stack: Stack, node: str) -> str:
        """Return the machine that a node of the stack's table is on, by Ray's id."""
        return self.held(stack).get(node, ({}, ""))[1]

    def assert_nothing_is_left(self, stack: Stack) -> None:
        import ray

        assert self.actors(stack) == []
        assert self.held(stack) == {}
        session = str(self._cluster.head_node.get_session_dir_path())
        wait_until("the processes of the actors gone", lambda: _actors_of(session) == [], 30.0)
        wait_until("all resources free again", lambda: _counted(ray.available_resources()) == self.total())

    def total(self) -> dict[str, float]:
        import ray

        return _counted(ray.cluster_resources())


@contextlib.contextmanager
def running_cluster(**resources: Any) -> Iterator[RayCluster]:
    """Start a cluster of one machine with these resources, and end it with all others."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **SMALL,
            **_with_shares(resources),
        },
    )
    try:
        ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level=logging.ERROR)
        yield RayCluster(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _with_shares(resources: dict[str, Any]) -> dict[str, Any]:
    """Ray's own names are arguments; any other resource is in the mapping `resources`."""
    own = {name: value for name, value in resources.items() if name in ("num_cpus", "num_gpus")}
    return {**own, "resources": {name: value for name, value in resources.items() if name not in own}}


def _counted(resources: dict[str, float]) -> dict[str, float]:
    return {name: round(amount, 3) for name, amount in resources.items() if name in ("CPU", "GPU") and amount}


def _actors_of(session: str) -> list[int]:
    """Return the processes of actors of one cluster: their parents are its raylets, whose commands name its folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "NodeActor" in " ".join(process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent is not None and session in " ".join(parent.cmdline()):
                    found.append(process.pid)
    return found
