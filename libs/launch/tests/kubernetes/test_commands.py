"""The command lines that go to helm and kubectl, and what their error texts mean to a user.

A recorder stands in for both where a test holds the exact lines: it writes each one down and answers what the test
says. It proves nothing of a cluster. Tests with the real kubectl need no cluster either.
"""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import yaml

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1.run_pb2 import RunState
from flotilla_core.config import StackConfig, load_text
from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from flotilla_launch.kubernetes import pods
from flotilla_launch.kubernetes.commands import Cluster, meaning_of
from flotilla_launch.kubernetes.engine import KubernetesEngine
from flotilla_launch.kubernetes.values import CHART
from flotilla_launch.launcher import launcher_of
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import PlacedStack
from flotilla_launch.state import PlacedFile

RECORDER = """
import json, pathlib, sys
folder, name = pathlib.Path({folder!r}), {name!r}
line = " ".join([name, *sys.argv[1:]])
with (folder / "lines").open("a") as file:
    file.write(line + chr(10))
for words, out, error in json.loads((folder / "answers.json").read_text()):
    if words in line:
        sys.stdout.write(out)
        sys.exit(error)
"""
KUBECTL = "kubectl --context lab --namespace rl"
HELM = "--kube-context lab --namespace rl"
GET = f"{KUBECTL} get pods,deployments.apps,statefulsets.apps --selector app.kubernetes.io/instance=chat --output json"
NO_RELEASE = ("helm get metadata", "", "Error: release: not found")


class Recorder:
    """Stands in for helm and kubectl: writes command lines down, and answers what a test says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("helm", "kubectl"):
            path = folder / name
            path.write_text(f"#!{sys.executable}\n" + RECORDER.format(folder=str(folder), name=name))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.answers(NO_RELEASE)

    def answers(self, *answers: tuple[str, str, str]) -> None:
        """Answer commands that have these words with this output, and with this error if there is any."""
        whole = [
            *answers,
            ("get pods", listing(), ""),
            ("config current-context", "lab\n", ""),
            ("", "{}", ""),
        ]
        told = [[words, out, error or 0] for words, out, error in whole]
        (self._folder / "answers.json").write_text(json.dumps(told))

    def lines(self) -> list[str]:
        """Return the command lines since the last question."""
        file = self._folder / "lines"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return found


def listing(generators: int = 1) -> str:
    told = [
        ("nats", "nats-0", ""),
        *(("generator", f"generator-x{index}", "$(POD_NAME)") for index in range(generators)),
        ("trainer", "trainer-0", "trainer-0"),
        ("coordinator", "coordinator-0", "coordinator"),
    ]
    pods = [
        {
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/component": component}},
            "spec": {"containers": [{"name": component, "args": [f"--name={word}"]}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for component, name, word in told
    ]
    return json.dumps({"kind": "List", "items": pods})


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(KubernetesEngine, "look_every_s", 0.01)
    return Recorder(folder)


@pytest.fixture
def stack(tmp_path: Path) -> StackConfig:
    (tmp_path / "mine.yaml").write_text("nats: {replicas: 1}\n")
    return load_text(
        StackConfig,
        f"name: chat\nmodel: lab/chat\nstate_dir: {tmp_path}/state\nreward: {{replicas: 0}}\n"
        f"kubernetes: {{namespace: rl, values: [{tmp_path}/mine.yaml]}}\n",
    )


def engine_of(stack: StackConfig) -> KubernetesEngine:
    return KubernetesEngine(StackPaths.of(stack.state_dir, stack.name))


def launcher_of_stack(stack: StackConfig) -> PlacedStack:
    return PlacedStack(StackPaths.of(stack.state_dir, stack.name), engine_of(stack))


async def placed(stack: StackConfig) -> bool:
    launcher = launcher_of_stack(stack)
    return (await launcher.place(stack, on_progress=lambda _: None, on_wait=lambda _: None)).changed


async def test_up_asks_first_and_then_has_helm_install_the_chart_of_this_package(
    recorder: Recorder, stack: StackConfig
) -> None:
    assert await placed(stack)
    directory = stack.state_dir / "chat"
    assert recorder.lines() == [
        "kubectl config current-context",
        GET,
        f"helm get metadata chat --output json {HELM}",
        f"helm upgrade --install chat {CHART} --values {directory}/values.yaml {HELM}",
        GET,
        GET,
    ]
    values = yaml.safe_load((directory / "values.yaml").read_text())
    assert values["nats"] == {"replicas": 1} and values["stack"]["model"] == "lab/chat"
    credential = (directory / "credential.pem").read_text()
    assert values["auth"]["credential"] == credential, "that of the stack, which is on no command line"
    assert stat.S_IMODE((directory / "values.yaml").stat().st_mode) == 0o600


async def test_a_second_up_changes_nothing_and_a_changed_one_upgrades_with_the_same_secrets(
    recorder: Recorder, stack: StackConfig
) -> None:
    await placed(stack)
    values = stack.state_dir / "chat" / "values.yaml"
    first = yaml.safe_load(values.read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    deployed = json.dumps({"version": version, "status": "deployed"})
    recorder.answers(("helm get metadata", deployed, ""))
    recorder.lines()
    assert not await placed(stack)
    assert not [line for line in recorder.lines() if line.startswith("helm upgrade")]
    assert await placed(stack.model_copy(update={"restart_budget": 7}))
    assert [line for line in recorder.lines() if line.startswith("helm upgrade")]
    second = yaml.safe_load(values.read_text())
    assert second["auth"] == first["auth"] and second["stack"]["restart_budget"] == 7


async def test_every_later_command_asks_the_cluster_of_up(recorder: Recorder, stack: StackConfig) -> None:
    await placed(stack)
    recorder.answers(("config current-context", "other\n", ""), NO_RELEASE)
    recorder.lines()
    state = await launcher_of(StackPaths.of(stack.state_dir, stack.name)).state()
    assert [process.name for process in state.processes] == [
        "nats-0",
        "generator-x0",
        "trainer-0",
        "coordinator",
    ]
    assert state.nats_url == "nats://chat-flotilla-nats.rl.svc:4222"
    assert recorder.lines() == [GET]
    elsewhere = stack.kubernetes.model_copy(update={"context": "other"})
    with pytest.raises(FailedPrecondition, match="is up in namespace rl of lab"):
        await placed(stack.model_copy(update={"kubernetes": elsewhere}))


async def test_scale_changes_the_deployment_alone_and_is_remembered(
    recorder: Recorder, stack: StackConfig
) -> None:
    await placed(stack)
    recorder.answers(("get pods", listing(3), ""))
    recorder.lines()
    generator = ServiceKind.SERVICE_KIND_GENERATOR
    found = await launcher_of_stack(stack).scale(generator, 3, timeout_s=10)
    assert len(found) == 3
    assert recorder.lines()[0] == f"{KUBECTL} scale deployment/chat-flotilla-generator --replicas=3"
    values = yaml.safe_load((stack.state_dir / "chat" / "values.yaml").read_text())
    assert values["stack"]["generator"]["replicas"] == 3, "the next up does not undo it"


async def test_generators_that_something_else_scales_are_left_to_it(
    recorder: Recorder, stack: StackConfig, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("nats: {replicas: 1}\ngenerator: {autoscaling: {kind: hpa}}\n")
    await placed(stack)
    with pytest.raises(FailedPrecondition, match="hpa scales the generators"):
        await launcher_of_stack(stack).scale(ServiceKind.SERVICE_KIND_GENERATOR, 3, timeout_s=10)


async def test_down_removes_the_release_waits_for_its_pods_and_says_how_claims_are_deleted(
    recorder: Recorder, stack: StackConfig
) -> None:
    await placed(stack)
    recorder.answers(("helm get metadata", "{}", ""), ("get pods", '{"items": []}', ""))
    recorder.lines()
    said: list[str] = []
    assert await launcher_of_stack(stack).down(on_wait=said.append)
    assert recorder.lines() == [
        f"helm get metadata chat --output json {HELM}",
        f"helm uninstall chat {HELM}",
        GET,
    ]
    assert f"{KUBECTL} delete pvc --selector app.kubernetes.io/instance=chat" in said[-1]
    left = {path.name for path in (stack.state_dir / "chat").iterdir()}
    assert not {"placed.json", "values.yaml"} & left
    assert not await launcher_of_stack(stack).down(on_wait=said.append), "a second one does nothing"


async def test_logs_are_those_of_the_pods(recorder: Recorder, stack: StackConfig) -> None:
    await placed(stack)
    recorder.answers(
        ("logs coordinator-0", "one\ntwo\n", ""), ("logs trainer-0", "", "Error: container is waiting")
    )
    logs = await engine_of(stack).logs()
    recorder.lines()
    assert [line async for line in logs["coordinator"].tail(5, follow=True)] == ["one", "two"]
    assert recorder.lines() == [f"{KUBECTL} logs coordinator-0 --tail=5 --follow"]
    with pytest.raises(FailedPrecondition, match="container is waiting"):
        [line async for line in logs["trainer-0"].tail(5, follow=False)]


async def test_runs_are_asked_for_beside_the_coordinator(recorder: Recorder, stack: StackConfig) -> None:
    await placed(stack)
    told = json.dumps({"runs": [{"run_id": "r-1", "step": 7, "state": "running"}]})
    recorder.answers(("flotilla run list", told, ""))
    recorder.lines()
    (run,) = await engine_of(stack).runs()
    assert (run.run_id, run.step, run.state) == ("r-1", 7, RunState.RUN_STATE_RUNNING)
    assert recorder.lines() == [f"{KUBECTL} exec chat-flotilla-coordinator-0 -- flotilla run list --json"]
    reach = PlacedFile.read(stack.state_dir / "chat" / "placed.json").reach
    assert reach == f"{KUBECTL} exec -i chat-flotilla-coordinator-0 -- flotilla"


async def test_a_first_up_that_fails_leaves_no_release_and_no_placement(
    recorder: Recorder, stack: StackConfig
) -> None:
    forbidden = 'Error: deployments.apps is forbidden: User "me" cannot create resource "deployments"'
    recorder.answers(NO_RELEASE, ("helm upgrade", "", forbidden))
    with pytest.raises(PermissionDenied, match="may not do this"):
        await placed(stack)
    assert not (stack.state_dir / "chat" / "placed.json").exists()
    assert not [line for line in recorder.lines() if "uninstall" in line], "Helm has nothing of it"


async def test_a_release_of_somebody_else_is_not_taken_over(recorder: Recorder, stack: StackConfig) -> None:
    recorder.answers(("helm get metadata", "{}", ""))
    with pytest.raises(FailedPrecondition, match="that this host did not place"):
        await placed(stack)
    assert not stack.state_dir.exists()


async def test_a_pod_whose_image_cannot_be_pulled_ends_up(
    recorder: Recorder, stack: StackConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "PATIENCE_S", 0.0)
    objects = json.loads(listing())
    stuck = objects["items"][-1]
    stuck["status"] = {
        "phase": "Pending",
        "containerStatuses": [
            {"name": "coordinator", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
        ],
    }
    recorder.answers(NO_RELEASE, ("get pods", json.dumps(objects), ""), ("get events", '{"items": []}', ""))
    with pytest.raises(FailedPrecondition, match="coordinator did not start") as failed:
        await placed(stack)
    assert "ErrImagePull: not found" in failed.value.why and "make images" in failed.value.next_step


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ("error: current-context is not set", FailedPrecondition, "no cluster"),
        ('error: context "lba" does not exist', InvalidConfig, "no such context"),
        (
            'Error: kubernetes cluster unreachable: context "lab" does not exist',  # Helm 4.1
            InvalidConfig,
            "no such context",
        ),
        (
            'Error: Kubernetes cluster unreachable: Get "https://10.0.0.1:6443/version": dial tcp: i/o timeout',
            Unavailable,
            "does not answer",
        ),
        (
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
            Unavailable,
            "does not answer",
        ),
        (
            'Error from server (Forbidden): pods is forbidden: User "me" cannot list resource "pods" in API group "" '
            'in the namespace "rl"',
            PermissionDenied,
            "may not",
        ),
        (
            'Error from server (Forbidden): pods "x" is forbidden: exceeded quota: gpus, requested: 8',
            FailedPrecondition,
            "quota",
        ),
        ("error: You must be logged in to the server (Unauthorized)", Unauthenticated, "does not know"),
        (
            'Error: create: failed to create: namespaces "rl" not found',
            FailedPrecondition,
            "namespace does not exist",
        ),
        (
            "Error: UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress",
            FailedPrecondition,
            "cut off",
        ),
        (
            "Error: values don't meet the specifications of the schema(s) in the following chart(s):\nflotilla:\n"
            "- at '/imag': additional properties not allowed",
            InvalidConfig,
            "refuses these values",
        ),
        (
            "Error: execution error at (flotilla/templates/configmaps.yaml:2:4): no credential: give auth.credential",
            InvalidConfig,
            "refuses these values",
        ),
        (
            "Error: unable to build kubernetes objects from release manifest: resource mapping not found: "
            'no matches for kind "ScaledObject" in version "keda.sh/v1alpha1"\nensure CRDs are installed first',
            FailedPrecondition,
            "does not know a kind",
        ),
        (
            'Error: UPGRADE FAILED: cannot patch "chat" with kind StatefulSet: StatefulSet.apps "chat" is invalid: '
            "Forbidden: updates to statefulset spec for fields other than 'replicas' are forbidden",
            FailedPrecondition,
            "in place",
        ),
        (
            "Error: chart requires kubeVersion: >=1.30.0-0 which is incompatible with Kubernetes v1.27.3",
            FailedPrecondition,
            "too old",
        ),
        ("Error: release: not found", NotFound, "no such release"),
        ("something new", FailedPrecondition, "refuses"),
    ],
)
def test_an_error_text_says_what_it_means_and_what_to_do(
    text: str, kind: type[FlotillaError], what: str
) -> None:
    error = meaning_of(["helm", "upgrade"], text)
    assert type(error) is kind and what in error.what
    assert error.why == text and (error.next_step or kind is NotFound)


async def test_where_a_command_is_missing_up_says_which_and_leaves_nothing(
    tmp_path: Path, stack: StackConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FailedPrecondition, match="kubectl cannot be run"):
        await placed(stack)
    assert not stack.state_dir.exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_the_real_kubectl_without_a_cluster_is_understood(
    tmp_path: Path, stack: StackConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(FailedPrecondition, match="kubectl has no cluster"):
        await placed(stack)
    with pytest.raises(InvalidConfig, match="no such context"):
        await Cluster("lba", "rl").kubectl("get", "pods")
    nobody = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "c", "user": ""}}],
    }
    (tmp_path / "none").write_text(yaml.safe_dump(nobody))
    with pytest.raises(Unavailable, match="the cluster does not answer"):
        await Cluster("lab", "rl").kubectl("get", "pods")
    assert not stack.state_dir.exists()
