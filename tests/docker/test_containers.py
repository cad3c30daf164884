"""A fleet of containers that share no folder trains, and goes on when one dies and when one is cut off for a while.

Images, vLLM, trainer, ledger and NATS are real, and each sync has its canary, as users have it by default. The model is
the same read-only folder in every container; nothing else is in two of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import yaml
from composed import NO_ANSWER, USER, Fleet, bring, composed, crash, told, wait_for
from docker import DockerClient
from engine import TAG
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import HealthcheckWaitStrategy

from flotilla_testing.runs import small_run

pytestmark = pytest.mark.timeout(1800)

LARGEST_COORDINATOR = 300e6  # bytes above its base
READY_S = 420.0
STEP_S = 240.0
STEPS = 4000  # more than are made before the run is told to end
MODULES = "pyarrow.parquet, pyarrow.ipc, pyarrow.csv, matplotlib.backends.backend_agg, zstandard, tokenizers"


@pytest.fixture(scope="module")
def work(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the operator brings: a model, data and a run file, which the user of the containers can read."""
    folder = tmp_path_factory.mktemp("work")
    examples = folder / "examples"
    shutil.copytree(arithmetic, examples)
    file = small_run(Path("examples"), examples / "run.yaml", steps=STEPS)
    description = yaml.safe_load(file.read_text())
    # The untrained model learns soon to answer in digits. Silence is noticed soon, because the test waits for it.
    digits = {"reward": "regex", "parameters": {"pattern": "[0-9]{1,3}", "match": "whole"}}
    description["rewards"] = [{"reward": "exact"}, digits]
    description["optimizer"]["learning_rate"] = 1.0e-3
    description["rollout"]["sample_timeout_s"] = 30
    description["weights"] = {"timeout_s": 20}
    description["checkpoint"] = {"every_steps": 4}
    file.write_text(yaml.safe_dump(description))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def settings(work: Path) -> Path:
    return bring(work, TAG)


@pytest.fixture(scope="module")
def fleet(docker: DockerClient, images: dict[str, str], settings: Path) -> Iterator[Fleet]:
    with composed(docker, settings) as running:
        yield running


def alone(image: str) -> DockerContainer:
    """Return a container that waits for commands, without a network."""
    container = DockerContainer(image, network_mode="none", read_only=True)
    return container.with_tmpfs_mount("/tmp").with_command(["sleep", "infinity"])


@pytest.mark.parametrize("service", ("coordinator", "reward", "trainer", "generator"))
def test_an_image_runs_as_a_user_and_tells_what_is_in_it(
    docker: DockerClient, images: dict[str, str], service: str
) -> None:
    image = docker.images.get(images[service])
    described = image.attrs["Config"]
    assert described["User"] == "10001:10001" and described["Healthcheck"]["Test"]
    assert described["Labels"]["org.opencontainers.image.title"] == f"flotilla-{service}"
    history = " ".join(layer["CreatedBy"] for layer in image.history())
    assert not re.search(r"https?://", history), "no address of an index is in a layer's command"
    with alone(images[service]) as container:
        running = container.get_wrapped_container()
        assert told(running, "id", "-u").strip() == "10001"
        bill = json.loads(told(running, "cat", "/opt/flotilla/sbom.cdx.json"))
        left = told(running, "sh", "-c", "ls /etc/pip.conf /run/secrets 2>/dev/null || true")
    assert f"flotilla-{service}" in {one["name"] for one in bill["components"]}
    assert not [one for one in bill["components"] if one["name"] == "pip"]
    assert not left.strip()


def test_the_coordinators_image_is_small_and_reads_parquet(
    docker: DockerClient, base: str, images: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    base_size = docker.images.get(base).attrs["Size"]
    above = {service: docker.images.get(image).attrs["Size"] - base_size for service, image in images.items()}
    sizes = ", ".join(f"{service} {size / 1e6:.0f} MB" for service, size in above.items())
    with capsys.disabled():
        sys.stdout.write(f"\n  above the base of {base_size / 1e6:.0f} MB: {sizes}\n")
    assert above["coordinator"] < LARGEST_COORDINATOR
    with alone(images["coordinator"]) as container:
        told(container.get_wrapped_container(), "python", "-c", f"import {MODULES}")


def test_containers_find_each_other_without_compose_and_docker_knows_that_they_serve(
    docker: DockerClient, images: dict[str, str], settings: Path
) -> None:
    """A container is a host of its own: it needs secrets, a stack file, and a network on which its peers have names."""
    work = settings.parent

    def host(service: str, name: str, network: Network, **secrets: str) -> DockerContainer:
        user = f"{USER}:{os.getgid() or USER}"
        container = DockerContainer(images[service], hostname=name, user=user, cap_drop=["ALL"])
        container.with_network(network).with_network_aliases(name).with_env("FLOTILLA_NAME", name)
        container.with_volume_mapping(work / "stack.yaml", "/etc/flotilla/stack.yaml")
        container.with_volume_mapping(work / "examples" / "model", "/models/model")
        for target, source in secrets.items():
            container.with_volume_mapping(work / "secrets" / source, f"/run/secrets/{target}")
        return container

    with ExitStack() as stack:
        network = stack.enter_context(Network(docker_network_kw={"internal": True}))
        nats = host("coordinator", "nats", network, nats_conf="nats_conf")
        stack.enter_context(nats.with_command(["nats-server", "--config", "/run/secrets/nats_conf"]))
        login = {"coordinator": "nats_coordinator_credentials", "reward": "nats_credentials"}
        serving = HealthcheckWaitStrategy().with_startup_timeout(120)
        coordinator, _ = (
            stack.enter_context(
                host(name, name, network, credential="credential", nats_credentials=file).waiting_for(serving)
            )
            for name, file in login.items()
        )
        command = ("flotilla", "replicas", "list", "--json")
        listed = json.loads(told(coordinator.get_wrapped_container(), *command))
    assert [(one["name"], one["work"]) for one in listed["replicas"]] == [("reward", "ready")]


def test_a_run_goes_on_through_a_death_and_a_cut_and_loses_nothing(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    began = monotonic()

    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"  {monotonic() - began:4.0f} s: {text}\n")
            sys.stdout.flush()

    wait_for("a generator and a reward", lambda: _ready(fleet, generators=1), READY_S)
    started: dict[str, Any] = fleet.flotilla("run", "start", "examples/run.yaml")
    run_id = started["run_id"]
    wait_for("the second step", lambda: fleet.steps(run_id) >= 2, READY_S)
    say(f"run {run_id} makes steps")

    fleet.compose.scale("generator", 2)
    wait_for("the second generator", lambda: _ready(fleet, generators=2), READY_S)
    done = fleet.steps(run_id)
    wait_for("two steps with both", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    say(f"two generators at step {fleet.steps(run_id)}")

    killed, cut = fleet.containers("generator")
    crash(killed)
    done = fleet.steps(run_id)
    wait_for("two steps after the death of a generator", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    wait_for("the generator that Docker started again", lambda: _ready(fleet, generators=2), READY_S)
    say(f"a generator was killed and is back at step {fleet.steps(run_id)}")

    with fleet.cut_off(cut):
        done = fleet.steps(run_id)
        wait_for("two steps without the one that is cut off", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    wait_for("the one that was cut off", lambda: _ready(fleet, generators=2), READY_S)
    done = fleet.steps(run_id)
    wait_for("two steps after its return", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    say(f"a generator was cut off and is back at step {fleet.steps(run_id)}")

    (coordinator,) = fleet.containers("coordinator")
    done = fleet.steps(run_id)
    crash(coordinator)
    # The last step before its death may be in the ledger and not yet in what was read.
    wait_for("two steps after the death of the coordinator", lambda: fleet.steps(run_id) >= done + 3, READY_S)
    say(f"the coordinator was killed and is back at step {fleet.steps(run_id)}")

    fleet.flotilla("run", "set", run_id, f"steps={fleet.steps(run_id) + 4}")
    wait_for("the end of the run", lambda: _state(fleet, run_id) not in ("running", "pending"), READY_S)
    shown = fleet.run_state(run_id)
    assert shown["state"] == "succeeded", shown
    say(f"{shown['step']} steps: {fleet.verdict(run_id)}")
    metrics = fleet.metrics(shown["directory"])
    differences = [step["canary/mean"] for step in metrics if "canary/mean" in step]
    say(f"canary in {len(differences)} of {len(metrics)} steps, at most {max(differences):.1e} on the mean")
    assert {step["step"] for step in metrics} == set(range(shown["step"]))
    rewards = [step["reward/mean"] for step in metrics]
    first, last = sum(rewards[:8]) / 8, sum(rewards[-8:]) / 8
    say(f"mean reward of the first steps {first:.2f}, of the last ones {last:.2f}")
    assert last > first, "what the generators sample comes from what the trainer learns"


def _ready(fleet: Fleet, *, generators: int) -> bool:
    return len(fleet.available("generator")) >= generators and bool(fleet.available("reward"))


def _state(fleet: Fleet, run_id: str) -> str:
    try:
        return str(fleet.run_state(run_id)["state"])
    except NO_ANSWER:
        return "running"  # its coordinator does not answer: then it is not known to have ended
