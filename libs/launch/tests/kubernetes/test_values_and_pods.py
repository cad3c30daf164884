"""The plan and the values of a stack on Kubernetes, and its pods as the list of a launcher.

No cluster is asked. `tests/helm` compares plan and values with what Helm's own engine renders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.config import StackConfig, load_text
from flotilla_core.errors import InvalidConfig
from flotilla_launch.kubernetes.pods import name_of, pods_by_name, processes_of, rolling, stages_of, troubles
from flotilla_launch.kubernetes.table import Release, rows_of
from flotilla_launch.kubernetes.values import Words, check, given_values, values_of
from flotilla_launch.launcher import planned

STACK = """
name: chat
model: lab/chat-1b
generator: {replicas: 2, engine: sim}
kubernetes: {namespace: rl}
"""
READY = pb.ProcessState.PROCESS_STATE_READY
STARTING = pb.ProcessState.PROCESS_STATE_STARTING


def stack_of(more: str = "", values: dict[str, str] | None = None, folder: Path | None = None) -> StackConfig:
    stack = load_text(StackConfig, STACK + more)
    files = []
    for name, text in (values or {}).items():
        assert folder is not None
        (folder / name).write_text(text)
        files.append(folder / name)
    return stack.model_copy(
        update={"kubernetes": stack.kubernetes.model_copy(update={"values": tuple(files)})}
    )


def release_of(stack: StackConfig) -> Release:
    return Release.of(stack, values_of(stack, given_values(stack), None))


def test_the_plan_has_a_row_for_each_pod_with_its_workload(tmp_path: Path) -> None:
    gpu = "gpu: {enabled: true}\ngenerator: {resources: {requests: {cpu: 1500m, memory: 4Gi}}}\nnats: {replicas: 1}\n"
    stack = stack_of("trainer: {nproc: 4}\ncritic: {replicas: 1}\n", {"mine.yaml": gpu}, tmp_path)
    rows = {row.name: row for row in planned(stack, "kubernetes")}
    assert {name: row.node for name, row in rows.items()} == {
        "nats-0": "statefulset/chat-flotilla-nats",
        "generator-0": "deployment/chat-flotilla-generator",
        "generator-1": "deployment/chat-flotilla-generator",
        "trainer-0": "statefulset/chat-flotilla-trainer",
        "critic-0": "statefulset/chat-flotilla-critic",
        "coordinator": "statefulset/chat-flotilla-coordinator",
        "reward-0": "deployment/chat-flotilla-reward",
    }
    assert rows["nats-0"].kind == "nats"
    assert {name: len(row.resources.gpus) for name, row in rows.items() if row.resources.gpus} == {
        "generator-0": 1,
        "generator-1": 1,
        "trainer-0": 4,
        "critic-0": 1,
    }
    generator = rows["generator-0"].resources
    assert (generator.cpus, generator.memory_mib, generator.ports) == (2, 4096, (7070,))


def test_the_values_below_stack_are_the_stack_file_alone() -> None:
    values = values_of(stack_of(), {}, None)["stack"]
    assert values["generator"]["dtype"] == "float32", "a default of the stack file, not the chart's bfloat16"
    assert values["generator"]["max_model_tokens"] is None, "it takes the chart's own default away"
    assert (values["bind"]["host"], values["bind"]["port"]) == ("0.0.0.0", 7070)
    left_to_the_chart = {"state_dir", "placement", "nats", "kubernetes", "slurm"} & values.keys()
    assert not left_to_the_chart and "keep_runs" not in values["coordinator"]
    assert "attach" not in values["trainer"], "keys without a value are not sent"


def test_secrets_are_the_values_unless_a_file_names_them(tmp_path: Path) -> None:
    words = Words("t" * 64, "n" * 64, "c" * 64, "r" * 64)
    made = values_of(stack_of(), {}, words)["auth"]
    assert made == {
        "existingSecret": "",
        "credential": "t" * 64,
        "natsPassword": "n" * 64,
        "natsCoordinatorPassword": "c" * 64,
        "natsRoutePassword": "r" * 64,
    }
    named = stack_of("", {"mine.yaml": "auth: {existingSecret: mine}\n"}, tmp_path)
    assert values_of(named, given_values(named), words)["auth"] == {"existingSecret": "mine"}
    assert "ttt" not in repr(words)


def test_later_files_of_values_win_and_none_describes_the_stack(tmp_path: Path) -> None:
    files = {"a.yaml": "image: {registry: a, pullPolicy: Always}\n", "b.yaml": "image: {registry: b}\n"}
    assert given_values(stack_of("", files, tmp_path)) == {"image": {"registry": "b", "pullPolicy": "Always"}}
    with pytest.raises(InvalidConfig, match="describes a stack"):
        given_values(stack_of("", {"c.yaml": "stack: {model: other}\n"}, tmp_path))


def test_variables_of_a_section_become_those_of_its_pods(tmp_path: Path) -> None:
    mine = "generator: {env: [{name: MINE, value: a}]}\n"
    more = "trainer: {environment: {NCCL_DEBUG: INFO}}\nreward: {environment: {B: c}}\n"
    stack = stack_of(more, {"mine.yaml": mine}, tmp_path)
    values = values_of(stack, given_values(stack), None)
    assert values["trainer"]["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert values["reward"]["env"] == [{"name": "B", "value": "c"}]
    assert values["generator"]["env"] == [{"name": "MINE", "value": "a"}]
    assert "environment" not in values["stack"]["trainer"]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ("bind: {credential_file: /etc/credential}\n", "bind.credential_file"),
        ("autoscale: {mode: act}\n", "autoscale.mode"),
        ("placement: colocated\n", "placement"),
        ("trainer: {nproc: 2, hosts: [{name: a, ranks: 1}, {name: b, ranks: 1}]}\n", "trainer.hosts"),
        ("reward: {attach: ['10.0.0.1:7070']}\n", "attach"),
        ("reward: {environment: {KEY: {environment: MINE}}}\n", "reward.environment.KEY"),
        ("critic: {replicas: 1, model: /home/me/critic}\n", "critic.model"),
    ],
)
def test_what_pods_cannot_have_is_refused_by_name(more: str, where: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        check(stack_of(more))
    assert where in str(refused.value) and refused.value.next_step


def test_what_no_value_can_say_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="two servers of NATS"):
        values_of(stack_of("nats: {url: 'nats://mine:4222', insecure: true}\n"), {}, None)
    more = "trainer: {environment: {A: b}}\ncritic: {replicas: 1, environment: {A: c}}\n"
    with pytest.raises(InvalidConfig, match="gangs have one environment"):
        values_of(stack_of(more), {}, None)


def test_a_model_of_a_volume_is_named_below_models() -> None:
    check(stack_of().model_copy(update={"model": Path("/models/chat")}))
    with pytest.raises(InvalidConfig, match="no pod has this folder"):
        check(stack_of().model_copy(update={"model": Path("/home/me/chat")}))


# The objects below have the keys of what `kubectl get --output json` prints, with those left out that nothing reads.


def pod(name: str, component: str, told: str, *, index: str = "", **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    if index:
        labels["apps.kubernetes.io/pod-index"] = index
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "creationTimestamp": "2026-11-25T10:00:00Z"},
        "spec": {
            "nodeName": "node-a",
            "containers": [
                {"name": "istio-proxy", "image": "proxy"},
                {"name": component, "args": [f"--name={told}", "--stack=/etc/flotilla/config/stack.yaml"]},
            ],
        },
        "status": {"phase": "Running", **status},
    }


def running(component: str, *, ready: bool = True, restarts: int = 0) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": str(ready)},
        ],
        "containerStatuses": [
            {"name": "istio-proxy", "ready": True, "restartCount": 9, "state": {"running": {}}},
            {
                "name": component,
                "ready": ready,
                "restartCount": restarts,
                "state": {"running": {"startedAt": "2026-11-25T10:01:00Z"}},
            },
        ],
    }


def waiting(component: str, reason: str, message: str = "", restarts: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": component,
                "ready": False,
                "restartCount": restarts,
                "state": {"waiting": {"reason": reason, "message": message}},
                **more,
            }
        ],
    }


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available.",
        }
    ],
}


def warning(
    about: str, kind: str, reason: str, message: str, at: str = "2026-11-25T10:02:00Z"
) -> dict[str, Any]:
    return {
        "kind": "Event",
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "eventTime": None,
        "involvedObject": {"kind": kind, "name": about},
    }


def listed(*objects: dict[str, Any], events: tuple[dict[str, Any], ...] = ()) -> dict[str, pb.ProcessStatus]:
    stack = stack_of("reward: {replicas: 0}\n")
    release = release_of(stack)
    rows = [row for row in rows_of(stack, release) if row.kind != "nats"]
    return {process.name: process for process in processes_of(objects, events, rows, release)}


def test_a_service_has_the_name_that_it_is_told() -> None:
    generator = pod("chat-flotilla-generator-7c9f-x2x4z", "generator", "$(POD_NAME)")
    assert name_of(generator) == "chat-flotilla-generator-7c9f-x2x4z"
    assert (
        name_of(pod("chat-flotilla-trainer-1", "trainer", "trainer-$(POD_INDEX)", index="1")) == "trainer-1"
    )
    assert name_of(pod("chat-flotilla-critic-0-gang-0-0-abcde", "trainer", "critic-0")) == "critic-0"
    assert name_of(pod("chat-flotilla-nats-2", "nats", "")) == "nats-2"
    assert pods_by_name([generator])["chat-flotilla-generator-7c9f-x2x4z"] == generator["metadata"]["name"]


def test_a_pod_is_ready_when_kubernetes_says_so_whatever_runs_beside_it() -> None:
    found = listed(
        pod("g-1", "generator", "$(POD_NAME)", **running("generator", restarts=2)),
        pod("g-2", "generator", "$(POD_NAME)", **running("generator", ready=False)),
        pod("t-0", "trainer", "trainer-0", **running("trainer")),
        pod("c-0", "coordinator", "coordinator", **running("coordinator")),
    )
    assert [*found] == ["g-1", "g-2", "trainer-0", "coordinator"], "in the order of the table"
    assert (found["g-1"].state, found["g-1"].restarts) == (READY, 2)
    assert found["g-1"].since.ToJsonString() == "2026-11-25T10:01:00Z"
    assert (found["g-2"].state, found["g-2"].error) == (STARTING, "")
    assert not any(process.address for process in found.values()), "this host need not reach a pod"


def test_a_pod_that_finds_no_node_says_what_is_missing() -> None:
    lonely = pod("t-0", "trainer", "trainer-0", **UNSCHEDULABLE)
    del lonely["spec"]["nodeName"]
    assert listed(lonely)["trainer-0"].error.startswith(
        "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia"
    )
    assert stages_of([lonely]) == {"t-0": 0}
    assert not troubles([lonely], [*listed(lonely).values()], 5), "a node may come"


def test_an_image_that_cannot_be_pulled_is_a_trouble_with_a_cure() -> None:
    stuck = pod(
        "c-0",
        "coordinator",
        "coordinator",
        **waiting("coordinator", "ImagePullBackOff", 'Back-off pulling image "a/b:1"'),
    )
    found = listed(stuck)
    assert found["coordinator"].error == 'ImagePullBackOff: Back-off pulling image "a/b:1"'
    (trouble,) = troubles([stuck], [*found.values()], 5)
    assert "make images" in trouble.next_step and "a/b:1" in trouble.why


def test_a_pod_that_dies_again_and_again_says_how_it_ended() -> None:
    last = {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    dying = pod(
        "t-0", "trainer", "trainer-0", **waiting("trainer", "CrashLoopBackOff", "back-off", 6, **last)
    )
    found = listed(dying)["trainer-0"]
    assert found.state == pb.ProcessState.PROCESS_STATE_RESTARTING
    assert found.error == "it ended with status 137 (OOMKilled)"
    assert not troubles([dying], [found], 6)
    assert "kubectl logs t-0" in troubles([dying], [found], 5)[0].next_step


def test_a_pod_that_waits_for_a_volume_says_so_by_its_newest_event() -> None:
    creating = pod("c-0", "coordinator", "coordinator", **waiting("coordinator", "ContainerCreating"))
    old = warning("c-0", "Pod", "FailedScheduling", "no nodes", at="2026-11-25T10:00:30Z")
    new = warning("c-0", "Pod", "FailedMount", 'secret "mine" not found')
    assert listed(creating, events=(new, old))["coordinator"].error == 'FailedMount: secret "mine" not found'


def test_a_pod_that_is_not_made_is_listed_with_what_keeps_it_away() -> None:
    quota = warning(
        "chat-flotilla-generator-7c9fd8b6d4",
        "ReplicaSet",
        "FailedCreate",
        'pods "chat-flotilla-generator-7c9fd8b6d4-" is forbidden: exceeded quota: gpus',
    )
    found = listed(pod("g-1", "generator", "$(POD_NAME)", **running("generator")), events=(quota,))
    assert [*found] == ["g-1", "generator-1", "trainer-0", "coordinator"]
    assert found["generator-1"].state == pb.ProcessState.PROCESS_STATE_STOPPED
    assert "exceeded quota" in found["generator-1"].error
    assert found["trainer-0"].error == "there is no pod of it in namespace rl"


def test_a_pod_that_ends_is_stopping_and_an_evicted_one_has_failed() -> None:
    ends = pod("g-1", "generator", "$(POD_NAME)", **running("generator"))
    ends["metadata"]["deletionTimestamp"] = "2026-11-25T10:05:00Z"
    evicted = pod(
        "t-0",
        "trainer",
        "trainer-0",
        phase="Failed",
        reason="Evicted",
        message="The node was low on resource: memory.",
    )
    found = listed(ends, evicted)
    assert found["g-1"].state == pb.ProcessState.PROCESS_STATE_STOPPING
    assert found["trainer-0"].state == pb.ProcessState.PROCESS_STATE_FAILED
    assert found["trainer-0"].error == "Evicted: The node was low on resource: memory."


def workload(kind: str, wanted: int, **status: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "metadata": {"name": "w", "generation": 2},
        "spec": {"replicas": wanted},
        "status": {"observedGeneration": 2, **status},
    }


def test_a_workload_rolls_until_all_its_pods_are_the_wanted_ones() -> None:
    whole = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2, "readyReplicas": 2}
    assert not rolling([workload("Deployment", 2, **whole)])
    assert rolling([workload("Deployment", 3, **whole)]) == ["w"], "one more is wanted"
    assert rolling([workload("Deployment", 2, **{**whole, "updatedReplicas": 1})]) == ["w"], (
        "one is of before"
    )
    assert rolling([workload("Deployment", 2, **{**whole, "observedGeneration": 1})]) == ["w"], (
        "nobody looked yet"
    )
    same = {"replicas": 1, "readyReplicas": 1, "currentRevision": "a", "updateRevision": "a"}
    assert not rolling([workload("StatefulSet", 1, **same)])
    assert rolling([workload("StatefulSet", 1, **{**same, "updateRevision": "b"})]) == ["w"]
    assert not rolling([workload("Deployment", 0)]), "scaled to none"
