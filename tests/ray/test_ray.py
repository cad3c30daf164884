"""A stack on a real Ray cluster: actors hold what the plan says, runs survive a lost machine, and nothing is left.

`make test-ray`, which needs no root: its environment has Ray. Skipped with a reason elsewhere.
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from accounts import assert_accounted_for

from flotilla_testing.chaos_run import ChaosRun
from flotilla_testing.placed_stacks import (
    AGENT,
    SPREAD,
    assert_files_are_gone,
    assert_runs_its_plan,
    assert_up_changes_nothing,
    described,
    endpoints,
    fails_without_its_secret,
    goes_on_after,
    placed,
    states,
    told,
)
from flotilla_testing.ray_cluster import RayCluster, reason_to_skip, running_cluster
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "Ray is here"),
]
SERVES = {"resources": {"serves": 1}}
"""Of what must not take the room of a spare machine: Ray places it where the cluster has `serves`."""
MOVED_S = 60.0
"""From the moment that Ray misses a machine to the agent at work elsewhere, in a new process."""


def on_ray(stack: Stack, cluster: RayCluster) -> AbstractContextManager[Stack]:
    return placed(stack, "ray", lambda: cluster.assert_nothing_is_left(stack))


def assert_holds_its_plan(stack: Stack, cluster: RayCluster) -> None:
    """What Ray has set aside is what the table asks for, node by node."""
    asked: dict[str, dict[str, float]] = {}
    for row in stack.ok("up", "--on", "ray", "--plan")["services"]:
        node = asked.setdefault(row["node"], {"CPU": 0, "GPU": 0, "memory": 0})
        node["CPU"] += row["cpus"] or 0
        node["GPU"] += len(row["gpus"])
        node["memory"] += (row["memory_mib"] or 0) << 20
    assert asked == {
        node: {name: bundle.get(name, 0) for name in ("CPU", "GPU", "memory")}
        for node, (bundle, _) in cluster.held(stack).items()
    }
    assert cluster.actors(stack) == sorted(asked)


def test_a_killed_machine_moves_its_replica_and_the_run_loses_nothing(
    arithmetic: Path, tmp_path: Path
) -> None:
    """The first machine has room for all but the second generator, until the second machine is lost."""
    with running_cluster(num_cpus=6, num_gpus=2) as cluster:
        stack = described(
            "ray",
            tmp_path,
            arithmetic / "model",
            generator={"engine": "sim", "sim": {"seconds_per_token": 0.02}},
            ray={"address": cluster.address, "gpus": True, "trainer": {"cpus": 2, "memory_mib": 64}},
        )
        with on_ray(stack, cluster):
            spare = cluster.hold(CPU=1)
            other = cluster.add(num_cpus=1)
            stack.ok("scale", "generator", "2")
            assert cluster.machine(stack, "generator-0") == cluster.machine(stack, "head")
            lost = cluster.machine(stack, "generator-1")
            assert lost not in ("", cluster.machine(stack, "head"))
            assert psutil.Process(_pid(stack, "trainer")).environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
            assert psutil.Process(_pid(stack, "generator-0")).environ()["CUDA_VISIBLE_DEVICES"] == ""
            with ChaosRun(stack, arithmetic, tmp_path) as run:
                run.wait_for_steps(2, 0, "with two generators")
                wait_until("a version on both generators", lambda: len(run.serving()) == 2)
                cluster.give(spare)
                cluster.kill(other)
                done = run.lines
                run.wait_for_steps(3, done, "with the generator that is left")
                cluster.wait_until_missed(other)
                wait_until(
                    "the replica on the other machine",
                    lambda: told(stack, "generator-1").get("place") == cluster.machine(stack, "head"),
                    MOVED_S,
                )
                wait_until("the replica in the run again", lambda: len(run.serving()) == 2, MOVED_S)
                ended = run.ends_by_itself()
            assert set(states(stack).values()) == {"ready"}
            verdict = assert_accounted_for(stack, ended.run_id)
            assert verdict.trained == 16 * ended.step
            assert '"event": "ready"' in stack.flotilla("logs", "generator-1").out
            assert "tending" in stack.flotilla("logs", "launcher-generator-1").out


def test_a_trainer_on_two_machines_loses_one_and_an_agent_and_the_run_loses_nothing(
    arithmetic: Path, tmp_path: Path
) -> None:
    """The first machine has all but the ranks. Each of the others has room for one, and one of them is spare."""
    with running_cluster(num_cpus=3, serves=3) as cluster:
        machines = [cluster.add(num_cpus=1, learns=1) for _ in range(3)]
        stack = described(
            "ray",
            tmp_path,
            arithmetic / "model",
            generator={"engine": "sim", "sim": {"seconds_per_token": 0.02}},
            trainer=SPREAD,
            ray={
                "address": cluster.address,
                "head": SERVES,
                "generator": SERVES,
                "reward": SERVES,
                "trainer": {"resources": {"learns": 1}},
            },
        )
        with on_ray(stack, cluster):
            assert_runs_its_plan(stack, "ray")
            assert_holds_its_plan(stack, cluster)
            front, lost = cluster.machine(stack, "trainer"), cluster.machine(stack, AGENT)
            assert front != lost
            with ChaosRun(stack, arithmetic, tmp_path) as run:
                run.wait_for_steps(2, 0, "on two machines")
                psutil.Process(_pid(stack, AGENT)).send_signal(signal.SIGKILL)
                goes_on_after("the agent was killed", run, 1)
                machine = next(one for one in machines if one.node_id == lost)
                cluster.kill(machine)
                cluster.wait_until_missed(machine)
                wait_until(
                    "the agent on the spare machine",
                    lambda: cluster.machine(stack, AGENT) not in ("", lost, front),
                    MOVED_S,
                )
                goes_on_after("the machine was lost", run, 2)
                assert cluster.machine(stack, "trainer") == front, "what was not lost stays where it is"
                ended = run.ends_by_itself()
            wait_until("all services ready", lambda: set(states(stack).values()) == {"ready"})
            verdict = assert_accounted_for(stack, ended.run_id)
            assert verdict.trained == 16 * ended.step
            assert '"event": "ready"' in stack.flotilla("logs", AGENT).out


def test_the_arithmetic_example_runs_to_its_end_on_two_machines(arithmetic: Path, tmp_path: Path) -> None:
    """A real engine and a real trainer on different machines: weights, samples and spans go between them."""
    with running_cluster(num_cpus=3, learns=1, serves=2) as cluster:
        cluster.add(num_cpus=1, decodes=1)
        stack = described(
            "ray",
            tmp_path,
            arithmetic / "model",
            generator={"max_model_tokens": 64},
            ray={
                "address": cluster.address,
                "head": SERVES,
                "reward": SERVES,
                "trainer": {"resources": {"learns": 1}},
                "generator": {"resources": {"decodes": 1}},
            },
        )
        with on_ray(stack, cluster):
            assert_runs_its_plan(stack, "ray")
            assert_holds_its_plan(stack, cluster)
            assert cluster.machine(stack, "trainer") != cluster.machine(stack, "generator-0")
            run = stack.run(small_run(arithmetic, tmp_path / "run.yaml"), timeout_s=400)
            assert run["state"] == "succeeded"
            assert_accounted_for(stack, run["run_id"])


def test_actors_are_found_by_other_shells_and_come_back_where_they_were_killed(
    arithmetic: Path, tmp_path: Path
) -> None:
    with running_cluster(num_cpus=3, num_gpus=3) as cluster:
        first = cluster.add(num_cpus=1, heads=1)
        stack = described(
            "ray",
            tmp_path,
            arithmetic / "model",
            generator={"engine": "sim"},
            trainer={"replicas": 0},
            ray={"address": cluster.address, "gpus": True, "head": {"resources": {"heads": 1}}},
        )
        with on_ray(stack, cluster):
            assert_runs_its_plan(stack, "ray")
            assert_holds_its_plan(stack, cluster)
            before = endpoints(stack)
            for node in ("generator-0", "head"):
                killed = told(stack, node)["pid"]
                psutil.Process(killed).send_signal(signal.SIGKILL)
                wait_until(f"another actor of {node}", lambda n=node, p=killed: told(stack, n)["pid"] != p)
                wait_until("all services ready", lambda: set(states(stack).values()) == {"ready"}, 120.0)
                assert endpoints(stack) == before, "the others need not be told"

            stack.ok("scale", "generator", "2")
            assert cluster.actors(stack) == ["generator-0", "generator-1", "head", "reward-0"]
            stack.ok("scale", "generator", "0")
            stack.ok("scale", "reward", "2")
            assert cluster.actors(stack) == ["head", "reward-0", "reward-1"]
            assert states(stack) == dict.fromkeys(("nats", "coordinator", "reward-0", "reward-1"), "ready")
            assert_up_changes_nothing(stack, "ray")

            cluster.add(num_cpus=1, heads=1)
            lost = cluster.machine(stack, "head")
            cluster.kill(first)
            cluster.wait_until_missed(first)
            wait_until(
                "the head on another machine",
                lambda: (
                    cluster.machine(stack, "head") not in ("", lost)
                    and told(stack, "head").get("place") == cluster.machine(stack, "head")
                ),
                MOVED_S,
            )
            wait_until("all services ready", lambda: set(states(stack).values()) == {"ready"}, 120.0)


def test_a_stack_that_does_not_come_up_leaves_no_actor(arithmetic: Path, tmp_path: Path) -> None:
    with running_cluster(num_cpus=3) as cluster:
        at = {"address": cluster.address}
        stack = fails_without_its_secret("ray", tmp_path, arithmetic / "model", ray=at)
        cluster.assert_nothing_is_left(stack)
        assert_files_are_gone(stack)


def test_a_cluster_that_is_not_there_is_named_and_nothing_is_remembered(
    arithmetic: Path, tmp_path: Path
) -> None:
    stack = described("ray", tmp_path, arithmetic / "model", generator={"engine": "sim"})
    outcome = stack.flotilla("up", "--on", "ray")
    assert outcome.code != 0
    assert "no Ray cluster answers" in outcome.err
    assert_files_are_gone(stack)


def _pid(stack: Stack, name: str) -> int:
    return next(int(one["pid"]) for one in told(stack, name)["processes"] if one["name"] == name)
