"""A stack on a real Slurm cluster: its job places the plan, runs survive a lost component, and nothing is left.

`make test-slurm`, as root, with Debian's slurmctld, slurmd, slurm-client and munge. Skipped with a reason elsewhere.
"""

from __future__ import annotations

import json
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from accounts import assert_accounted_for
from slurm.cluster import Cluster, reason_to_skip, running_cluster

from flotilla_launch.paths import StackPaths
from flotilla_launch.state import read_json
from flotilla_testing.chaos_run import ChaosRun
from flotilla_testing.placed_stacks import (
    AGENT,
    READY_S,
    SPREAD,
    assert_files_are_gone,
    assert_runs_its_plan,
    assert_up_changes_nothing,
    described,
    fails_without_its_secret,
    goes_on_after,
    placed,
    states,
    told,
)
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "Slurm is here"),
]


def on_slurm(stack: Stack, cluster: Cluster) -> AbstractContextManager[Stack]:
    return placed(stack, "slurm", lambda: assert_no_job_is_left(cluster))


def listed(stack: Stack, name: str) -> dict[str, str]:
    """Return state and error of a process, as `flotilla ps` shows them."""
    (found,) = (process for process in stack.ok("ps")["processes"] if process["name"] == name)
    return {"state": found["state"], "error": found["error"] or ""}


def assert_no_job_is_left(cluster: Cluster) -> None:
    assert cluster.jobs() == {}


def test_a_cancelled_component_of_a_generator_costs_a_replica_and_not_the_run(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Four components on four nodes: head, trainer and two generators."""
    stack = described(
        "slurm",
        tmp_path,
        arithmetic / "model",
        generator={"engine": "sim", "replicas": 2, "sim": {"seconds_per_token": 0.02}},
    )
    with running_cluster(tmp_path, nodes=4) as cluster, on_slurm(stack, cluster):
        assert set(cluster.jobs()) == {"head", "trainer", "generator-0", "generator-1"}
        assert_runs_its_plan(stack, "slurm")
        with ChaosRun(stack, arithmetic, tmp_path) as run:
            run.wait_for_steps(2, 0, "with two generators")
            wait_until("a version on both generators", lambda: len(run.serving()) == 2)
            cluster.run("scancel", cluster.jobs()["generator-1"])
            done = run.lines
            run.wait_for_steps(3, done, "with the generator that is left")
            assert run.serving() == ["generator-0"]
            # Slurm says so a while after the processes of the component have ended.
            wait_until(
                "the end in the list",
                lambda: "is over (cancelled)" in listed(stack, "generator-1")["error"],
                60.0,
            )
            assert listed(stack, "generator-1")["state"] == "stopped"
            assert [name for name, state in states(stack).items() if state != "ready"] == ["generator-1"]

            assert stack.ok("up")["changed"], "up places again what is lost, without a further word"
            assert set(states(stack).values()) == {"ready"}
            wait_until("the new replica in the run", lambda: len(run.serving()) == 2, 60.0)
            ended = run.ends_by_itself()
        verdict = assert_accounted_for(stack, ended.run_id)
        assert verdict.trained == 16 * ended.step
        assert '"event": "ready"' in stack.flotilla("logs", "generator-1").out
        assert "tending" in stack.flotilla("logs", "launcher-head").out


def spread(folder: Path, model: Path) -> Stack:
    """Three components: head with the generator, and one for each host of the trainer."""
    return described(
        "slurm",
        folder,
        model,
        generator={"engine": "sim", "sim": {"seconds_per_token": 0.02}},
        trainer=SPREAD,
        slurm={"nodes": {"generator-0": "head"}},
    )


def test_a_trainer_on_two_nodes_loses_an_agent_and_its_component_and_the_run_loses_nothing(
    arithmetic: Path, tmp_path: Path
) -> None:
    stack = spread(tmp_path, arithmetic / "model")
    with running_cluster(tmp_path, nodes=3) as cluster, on_slurm(stack, cluster):
        assert set(cluster.jobs()) == {"head", "trainer", AGENT}
        assert cluster.node(AGENT) != cluster.node("trainer")
        assert_runs_its_plan(stack, "slurm")
        with ChaosRun(stack, arithmetic, tmp_path) as run:
            run.wait_for_steps(2, 0, "on two nodes")
            psutil.Process(told(stack, AGENT)["pid"]).send_signal(signal.SIGKILL)
            goes_on_after("the launcher's agent was killed on its node", run, 1)

            cluster.run("scancel", cluster.jobs()[AGENT])
            wait_until("the agent missed", lambda: states(stack)[AGENT] == "stopped", 60.0)
            listed = {process["name"]: process for process in stack.ok("ps")["processes"]}
            assert "flotilla up places it again" in listed[AGENT]["error"]
            assert {one["state"] for name, one in listed.items() if name != AGENT} == {"ready"}
            assert stack.ok("up")["changed"]
            goes_on_after("its component was cancelled", run, 2)
            ended = run.ends_by_itself()
        assert set(states(stack).values()) == {"ready"}
        verdict = assert_accounted_for(stack, ended.run_id)
        assert verdict.trained == 16 * ended.step
        assert '"event": "ready"' in stack.flotilla("logs", AGENT).out


def test_a_lost_node_ends_the_job_and_the_run_is_resumed_on_the_nodes_that_are_left(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Slurm itself ends a heterogeneous job with the first node that it loses."""
    stack = spread(tmp_path, arithmetic / "model")
    with running_cluster(tmp_path, nodes=4) as cluster, on_slurm(stack, cluster):
        with ChaosRun(stack, arithmetic, tmp_path) as run:
            run.wait_for_steps(2, 0, "on two nodes")
            lost = cluster.node(AGENT)
            cluster.lose(lost)
            wait_until("the end of the whole job", lambda: cluster.jobs() == {}, 120.0)
            assert set(states(stack).values()) == {"stopped"}
            stack.ok("up", timeout_s=2 * READY_S)
            assert cluster.node(AGENT) not in ("", lost)
            stack.ok("run", "resume", run.run_id)
            goes_on_after("a node was lost", run, 1)
            ended = run.ends_by_itself()
        verdict = assert_accounted_for(stack, ended.run_id)
        assert verdict.trained == 16 * ended.step


def test_the_arithmetic_example_runs_to_its_end_on_two_nodes(arithmetic: Path, tmp_path: Path) -> None:
    """A real engine and a real trainer on different nodes: weights, samples and spans go between them."""
    stack = described(
        "slurm",
        tmp_path,
        arithmetic / "model",
        generator={"max_model_tokens": 64},
        slurm={"nodes": {"trainer": "head"}, "head": {"cpus": 1}},
    )
    with running_cluster(tmp_path, nodes=2) as cluster, on_slurm(stack, cluster):
        assert set(cluster.jobs()) == {"head", "generator-0"}
        assert_runs_its_plan(stack, "slurm")
        run = stack.run(small_run(arithmetic, tmp_path / "run.yaml"), timeout_s=400)
        assert run["state"] == "succeeded"
        assert_accounted_for(stack, run["run_id"])
        timeline = tmp_path / "timeline.json"
        stack.ok("timeline", run["run_id"], "-o", str(timeline))
        assert {"generator-0", "trainer", "coordinator"} <= set(
            re.findall(r"generator-0|trainer|coordinator", timeline.read_text())
        )


def test_a_killed_agent_is_started_again_and_replicas_come_and_go(arithmetic: Path, tmp_path: Path) -> None:
    stack = described(
        "slurm",
        tmp_path,
        arithmetic / "model",
        generator={"engine": "sim"},
        trainer={"replicas": 0},
        slurm={"head": {"cpus": 1}},
    )
    with running_cluster(tmp_path, nodes=2) as cluster, on_slurm(stack, cluster):
        paths = StackPaths(stack.directory)

        def pid(node: str) -> int:
            return int((read_json(paths.node_file(node)) or {"pid": 0})["pid"])

        for node in ("generator-0", "head"):
            before, endpoints = pid(node), json.loads(paths.endpoints_file.read_text())
            psutil.Process(before).send_signal(signal.SIGKILL)
            wait_until(f"another agent of {node}", lambda n=node, p=before: pid(n) not in (0, p), 60.0)
            wait_until(f"the services of {node}", lambda: set(states(stack).values()) == {"ready"}, 120.0)
            assert json.loads(paths.endpoints_file.read_text()) == endpoints, "the others need not be told"

        stack.ok("scale", "generator", "2")
        stack.ok("scale", "reward", "2")
        assert set(cluster.jobs()) == {"head", "generator-0", "generator-1"}
        assert states(stack) == dict.fromkeys(
            ("nats", "coordinator", "reward-0", "reward-1", "generator-0", "generator-1"), "ready"
        )
        stack.ok("scale", "generator", "0")
        wait_until("the node of generator-0 back", lambda: set(cluster.jobs()) == {"head"}, 30.0)
        stack.ok("scale", "generator", "1")
        stack.ok("scale", "reward", "1")
        assert set(cluster.jobs()) == {"head", "generator-0"}
        assert_up_changes_nothing(stack, "slurm")


def test_a_stack_that_does_not_come_up_leaves_no_job(arithmetic: Path, tmp_path: Path) -> None:
    with running_cluster(tmp_path, nodes=2) as cluster:
        stack = fails_without_its_secret("slurm", tmp_path, arithmetic / "model")
        assert_no_job_is_left(cluster)
        assert_files_are_gone(stack)
