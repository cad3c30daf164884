"""Ray as a scheduler: a detached actor in a detached placement group for each node of the table.

Invariants: an actor has one name, which holds stack, placement and node, so any shell finds it. Its group has the same
name and one bundle, so what it holds is on one machine; the table says how much it is. The nodes of a gang on several
hosts share the group of the first, which has a bundle for each, every one on another machine. Ray places and places
again; it carries no call, sample or weight.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from flotilla_core.config import StackConfig, load
from flotilla_core.errors import FailedPrecondition, Unavailable
from flotilla_launch.cluster import Unit
from flotilla_launch.paths import StackPaths
from flotilla_launch.ray.nodes import RayNodes, check
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import Nodes, Row

_ANSWER_LIMIT_S = 10.0


class RayScheduler:
    """Runs the nodes of a stack as actors."""

    name = "ray"
    listing = "ray status"

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths
        self._namespace = f"flotilla-{paths.directory.name}"
        self._actors: dict[str, Any] = {}
        """The actors that this process has asked for, by name."""

    def check(self, stack: StackConfig) -> None:
        check(stack)

    def nodes(self, stack: StackConfig) -> Nodes:
        return RayNodes(stack)

    async def start(
        self, stack: StackConfig, placed: PlacedFile, table: Sequence[Row], nodes: Sequence[str]
    ) -> None:
        known = RayNodes(stack)
        for node in nodes:
            gang = known.gang(node)
            bundles = [known.bundle([row for row in table if row.node == one]) for one in gang]
            await asyncio.to_thread(self._start, placed, gang, bundles, gang.index(node))

    async def units(self, placed: PlacedFile) -> dict[str, Unit]:
        return await asyncio.to_thread(self._units, placed)

    async def end(self, units: Sequence[Unit]) -> None:
        await asyncio.to_thread(self._end, units)

    def _start(
        self, placed: PlacedFile, gang: Sequence[str], bundles: Sequence[dict[str, float]], index: int
    ) -> None:
        """Ask for the actor of one node of a gang, in the group of all of them."""
        ray = self._ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from flotilla_launch.ray.actor import NodeActor

        names = [self._name(placed, node) for node in gang]
        name, bundle = names[index], bundles[index]
        others = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU", "memory")}
        actor = ray.remote(NodeActor).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                _group(names[0], bundles), placement_group_bundle_index=index
            ),
        )
        self._actors[name] = actor.remote(
            str(self._paths.stack_file), gang[index], placed.mark, placed.executables, names, index
        )

    def _units(self, placed: PlacedFile) -> dict[str, Unit]:
        self._ray()
        from ray.util import list_named_actors, placement_group_table

        prefix = self._name(placed, "")
        actors = {name.removeprefix(prefix) for name in list_named_actors() if name.startswith(prefix)}
        # An actor without a group is about to end.
        units = {
            node: Unit(node, prefix + node, f"actor {prefix}{node}", "ending", lives=False, holds=True)
            for node in actors
        }
        known = RayNodes(self._stack())
        for group in placement_group_table().values():
            if group["name"].startswith(prefix) and group["state"] != "REMOVED":
                gang = known.gang(group["name"].removeprefix(prefix))
                for index, node in enumerate(gang):
                    units[node] = self._unit(group, index, prefix + node, node, actors.intersection(gang))
        return units

    def _unit(self, group: dict[str, Any], index: int, name: str, node: str, living: set[str]) -> Unit:
        """Return the unit of a node of a gang whose `living` nodes have an actor."""
        lives = node in living
        place = group["bundles_to_node_id"].get(index, "") if group["state"] != "PENDING" else ""
        asked = ", ".join(f"{amount:g} {what}" for what, amount in group["bundles"][index].items())
        wanting = "no machine" if len(group["bundles"]) == 1 else "no further machine"
        return Unit(
            node,
            name,
            f"actor {name}",
            "running" if lives else self._last_words(name),
            lives=lives,
            waits="" if place or not lives else f"{wanting} of the cluster has {asked} free",
            place=place,
            # The group of a gang holds all its bundles for as long as one of its actors lives.
            holds=lives or not living,
        )

    def _last_words(self, name: str) -> str:
        """Return why an actor has died, as far as Ray tells: it tells the process that asked for the actor."""
        actor = self._actors.get(name)
        if actor is None:
            return "it has died"
        ray = self._ray()
        try:
            ray.get(actor.tends.remote(), timeout=_ANSWER_LIMIT_S)
        except ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return lines[-1] if lines else type(error).__name__
        return "it has died"

    def _end(self, units: Sequence[Unit]) -> None:
        """End actors; the group of a gang is removed with the last of them."""
        ray = self._ray()
        from ray.util import get_placement_group, list_named_actors, remove_placement_group

        known = RayNodes(self._stack())
        others = {*list_named_actors()} - {unit.id for unit in units}
        for unit in units:
            try:
                ray.kill(ray.get_actor(unit.id, namespace=self._namespace), no_restart=True)
            except ValueError:
                pass  # It has ended, or there never was one.
            prefix = unit.id.removesuffix(unit.node)
            names = [prefix + node for node in known.gang(unit.node)]
            if others.intersection(names):
                continue
            try:
                remove_placement_group(get_placement_group(names[0]))
            except ValueError:
                pass

    def _stack(self) -> StackConfig:
        return load(StackConfig, [self._paths.stack_file])

    def _name(self, placed: PlacedFile, node: str) -> str:
        return f"{self._namespace}-{placed.mark}.{node}"

    def _ray(self) -> Any:
        """Return Ray, connected to the cluster; raise where it cannot be asked."""
        try:
            import ray
        except ImportError:
            raise FailedPrecondition(
                "Ray is not installed",
                where=sys.prefix,
                why="a stack on Ray asks its cluster for actors",
                next_step="install it into the environment of Flotilla, on every node: pip install -r "
                "requirements/ray.txt",
            ) from None
        if not ray.is_initialized():
            address = self._stack().ray.address
            try:
                ray.init(
                    address=address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise Unavailable(
                    "no Ray cluster answers",
                    where=f"ray.address {address}",
                    why=str(error),
                    next_step="start it (ray start --head), or run the command on a node of the cluster; if that "
                    f"cluster is gone for good, remove {self._paths.placed_file}",
                ) from None
        return ray


def _group(name: str, bundles: Sequence[dict[str, float]]) -> Any:
    """Return a placement group of these bundles, each of them on a machine of its own.

    The group of a gang exists where another node of the gang lives.
    """
    from ray.util import get_placement_group, placement_group

    if len(bundles) > 1:
        try:
            return get_placement_group(name)
        except ValueError:
            pass  # This is its first node.
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
    return placement_group([*bundles], strategy=strategy, name=name, lifetime="detached")
