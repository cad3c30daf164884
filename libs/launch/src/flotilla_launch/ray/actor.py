"""The actor of one node, which runs the node's agent in a thread for as long as its services are wanted.

Invariants: an actor is told text alone. Ray starts an actor that was killed again, and one whose machine is lost on
another one; its agent then begins anew. An agent that has ended gives the resources of the node back to Ray, and the
actor ends with them. Services die with the thread of their agent, however the actor ends.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from flotilla_core.config import StackConfig, load
from flotilla_core.errors import FlotillaError
from flotilla_core.files import keep_private
from flotilla_core.logger import get_logger
from flotilla_launch.agent import run_agent
from flotilla_launch.gpus import VISIBLE
from flotilla_launch.paths import StackPaths
from flotilla_launch.ray.nodes import RayNodes

log = get_logger()


class NodeActor:
    """Owns the agent of a node."""

    def __init__(
        self, stack_file: str, node: str, mark: str, executables: str, gang: list[str], index: int
    ) -> None:
        """`gang` has the names of the actors in the same placement group, this one at `index`."""
        import ray

        keep_private()
        self._gang = gang
        self._name = gang[index]
        context = ray.get_runtime_context()
        # Of the services too, which inherit it: also where Ray gives none, so that none is taken.
        os.environ[VISIBLE] = ",".join(context.get_accelerator_ids()["GPU"])
        stack = load(StackConfig, [Path(stack_file)])
        paths = StackPaths.of(stack.state_dir, stack.name)
        # Ray's own file of this process is on the machine alone.
        sys.stdout = sys.stderr = paths.log_file(f"launcher-{node}").open("a", buffering=1)
        self._tending = threading.Thread(
            target=self._tend,
            args=(stack, node, mark, Path(executables), context.get_node_id()),
            name=f"agent of {node}",
            daemon=True,
        )
        self._tending.start()

    def tends(self) -> bool:
        """Return whether the agent runs; a caller learns from the failure of the call why the actor has died."""
        return self._tending.is_alive()

    def _tend(self, stack: StackConfig, node: str, mark: str, executables: Path, place: str) -> None:
        try:
            run_agent(stack, RayNodes(stack), node, mark, executables=executables, place=place)
        except FlotillaError as error:
            log.error("the agent could not work", node=node, error=str(error))
        finally:
            self._leave()

    def _leave(self) -> None:
        """Give the resources back, which ends this process; those of a gang go back with its last actor.

        Ray cannot start the actor again without its placement group. It keeps the name until a command ends the actor.
        """
        import ray
        from ray.util import get_placement_group, list_named_actors, remove_placement_group

        others = {*self._gang} - {self._name}
        if others.intersection(list_named_actors()):
            ray.kill(ray.get_actor(self._name), no_restart=True)
        else:
            remove_placement_group(get_placement_group(self._gang[0]))
