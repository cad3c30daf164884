"""All processes of a machine are killed, at random, ten times: what it held is placed on those that are left."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_core.errors import FlotillaError
from flotilla_testing.chaos_run import ChaosRun
from flotilla_testing.placed_stacks import READY_S, assert_files_are_gone, described
from flotilla_testing.ray_cluster import RayCluster, reason_to_skip, running_cluster
from flotilla_testing.stack import Stack, wait_until

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "Ray is here"),
]

logger = logging.getLogger(__name__)
KILLS = 10
MACHINES = 3
CPUS = 3
"""What a machine holds: two of them have room for the five nodes of the stack, one of them has not."""
NODES = ("head", "trainer", "generator-0", "generator-1", "reward-0")
WAIT_S = 300.0


def placed(cluster: RayCluster, stack: Stack) -> dict[str, str]:
    """Return the machine of each node of the stack."""
    return {node: cluster.machine(stack, node) for node in NODES}


def state(run: ChaosRun) -> str:
    """Return the state of the run; empty while no coordinator answers."""
    shown = run.stack.flotilla("run", "show", run.run_id, "--json")
    return str(shown.json["state"]) if shown.code == 0 else ""


def ends(run: ChaosRun) -> None:
    """Tell the run its last step, as soon as its coordinator answers, and wait for its end."""

    def told() -> bool:
        try:
            with run.stack.client() as client:
                client.set_run(run.run_id, [f"steps={client.get_run(run.run_id).step + 3}"])
        except FlotillaError:
            return False
        return True

    wait_until("a coordinator that takes the last step", told, WAIT_S, every_s=1)
    wait_until("the end of the run", lambda: state(run) not in ("", "running"), WAIT_S, every_s=1)


def test_ten_kills_of_whole_machines_cost_nothing(arithmetic: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    choice = random.Random(seed)
    hit: set[str] = set()
    with running_cluster(num_cpus=0) as cluster:
        machines = [cluster.add(num_cpus=CPUS) for _ in range(MACHINES)]
        stack = described(
            "ray",
            tmp_path,
            arithmetic / "model",
            generator={"engine": "sim", "replicas": 2, "sim": {"seconds_per_token": 0.02}},
            reward={"workers": 1},
            restart_budget=1000,
            ray={"address": cluster.address},
        )
        try:
            stack.ok("up", "--on", "ray", timeout_s=2 * READY_S)
            run = ChaosRun(stack, arithmetic, tmp_path)
            for number in range(KILLS):
                before = run.lines
                what = f"before kill {number} of seed {seed}"
                wait_until(f"two more steps {what}", lambda n=before: run.lines >= n + 2, WAIT_S)
                # The coordinator's machine is one of the victims for certain, and each other node's very likely.
                held = placed(cluster, stack)
                victim = choice.randrange(MACHINES)
                if number == 0:
                    victim = next(i for i, one in enumerate(machines) if one.node_id == held["head"])
                lost = [node for node, machine in held.items() if machine == machines[victim].node_id]
                hit.update(lost)
                killed = cluster.kill_all(machines[victim])
                logger.warning(f"kill {number}: {', '.join(lost) or 'nothing'}, {killed} processes")
                wait_until(
                    f"all nodes of the stack on machines that are left, {what}",
                    lambda gone=machines[victim].node_id: not {"", gone} & {*placed(cluster, stack).values()},
                    WAIT_S,
                    every_s=1,
                )
                before = run.lines
                wait_until(f"a step without the machine, {what}", lambda n=before: run.lines > n, WAIT_S)
                machines[victim] = cluster.add(num_cpus=CPUS)
            ends(run)
            assert state(run) == "succeeded"
            assert {"head", "trainer"} <= hit, f"seed {seed} hit only {sorted(hit)}"
            verdict = assert_accounted_for(stack, run.run_id)
            logger.warning(str(verdict))
            assert stack.ok("down")["stopped"]
            cluster.assert_nothing_is_left(stack)
            assert_files_are_gone(stack)
        finally:
            stack.flotilla("down")
