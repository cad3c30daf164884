"""A fleet of containers that share no folder trains, and goes on when one dies and when one is cut off for a while.

The images are real, and so are the trainer, the ledger and NATS. FLOTILLA_DOCKER_ENGINE=vllm takes the real engine.
The model is the same read-only folder in every container; nothing else is in two of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import ENGINE, PROJECT, Fleet, composed, run, wait_for
from engine import TAG

from flotilla_testing.runs import small_run

pytestmark = pytest.mark.timeout(1800)

SERVICES = ("coordinator", "reward", "trainer", "generator")
LARGEST_COORDINATOR = 300e6  # bytes above its base
READY_S = 420.0
STEP_S = 240.0
STEPS = 400  # more than are made before the run is told to end


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
    if ENGINE == "sim":  # what it says is no policy's
        description["weights"]["canary"] = {"prompts": 0}
        description["algorithm"] = {"correction": {"warn_at": None, "fail_at": None}}
    description["checkpoint"] = {"every_steps": 4}
    file.write_text(yaml.safe_dump(description))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def fleet(
    docker: str, images: dict[str, str], work: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with composed(docker, tmp_path_factory.mktemp("composed"), work, TAG) as running:
        yield running


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_as_a_user_and_tells_what_is_in_it(
    docker: str, images: dict[str, str], service: str
) -> None:
    image = images[service]
    described = json.loads(run([docker, "image", "inspect", image], 60))[0]["Config"]
    assert described["User"] == "10001:10001" and described["Healthcheck"]["Test"]
    assert described["Labels"]["org.opencontainers.image.title"] == f"flotilla-{service}"
    alone = [docker, "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", image]
    assert run([*alone, "id", "-u"], 60).strip() == "10001"
    bill = json.loads(run([*alone, "cat", "/opt/flotilla/sbom.cdx.json"], 60))
    assert f"flotilla-{service}" in {one["name"] for one in bill["components"]}
    assert not [one for one in bill["components"] if one["name"] == "pip"]
    history = run([docker, "history", "--no-trunc", "--format", "{{.CreatedBy}}", image], 60)
    assert not re.search(r"https?://", history), "no address of an index is in a layer's command"
    left = run([*alone, "sh", "-c", "ls /etc/pip.conf /run/secrets 2>/dev/null || true"], 60)
    assert not left.strip()


def test_the_coordinators_image_is_small_and_reads_parquet(
    docker: str, base: str, images: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        name: int(json.loads(run([docker, "image", "inspect", name], 60))[0]["Size"])
        for name in (base, *images.values())
    }
    above = {service: sizes[image] - sizes[base] for service, image in images.items()}
    told = ", ".join(f"{service} {size / 1e6:.0f} MB" for service, size in above.items())
    with capsys.disabled():
        sys.stdout.write(f"\n  above the base of {sizes[base] / 1e6:.0f} MB: {told}\n")
    assert above["coordinator"] < LARGEST_COORDINATOR
    modules = (
        "pyarrow.parquet, pyarrow.ipc, pyarrow.csv, matplotlib.backends.backend_agg, zstandard, tokenizers"
    )
    run(
        [
            docker,
            "run",
            "--rm",
            "--network",
            "none",
            images["coordinator"],
            "python",
            "-c",
            f"import {modules}",
        ],
        120,
    )


def test_a_run_goes_on_through_a_death_and_a_cut_and_loses_nothing(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"  {text}\n")
            sys.stdout.flush()

    wait_for("a generator and a reward", lambda: _ready(fleet, generators=1), READY_S)
    started: dict[str, Any] = fleet.flotilla("run", "start", "examples/run.yaml")
    run_id = started["run_id"]
    wait_for("the second step", lambda: fleet.steps(run_id) >= 2, READY_S)
    say(f"run {run_id} makes steps")

    fleet.compose("up", "-d", "--scale", "generator=2", "--no-recreate")
    wait_for("the second generator", lambda: _ready(fleet, generators=2), READY_S)
    done = fleet.steps(run_id)
    wait_for("two steps with both", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    say(f"two generators at step {fleet.steps(run_id)}")

    killed, cut = fleet.containers("generator")
    fleet.crash(killed)
    done = fleet.steps(run_id)
    wait_for("two steps after the death of a generator", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    wait_for("the generator that Docker started again", lambda: _ready(fleet, generators=2), READY_S)
    say(f"a generator was killed and is back at step {fleet.steps(run_id)}")

    network = f"{PROJECT}_private"
    fleet.ask("network", "disconnect", network, cut)
    done = fleet.steps(run_id)
    wait_for("two steps without the one that is cut off", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    fleet.ask("network", "connect", network, cut)
    wait_for("the one that was cut off", lambda: _ready(fleet, generators=2), READY_S)
    done = fleet.steps(run_id)
    wait_for("two steps after its return", lambda: fleet.steps(run_id) >= done + 2, STEP_S)
    say(f"a generator was cut off and is back at step {fleet.steps(run_id)}")

    (coordinator,) = fleet.containers("coordinator")
    done = fleet.steps(run_id)
    fleet.crash(coordinator)
    # The last step before its death may be in the ledger and not yet in what was read.
    wait_for("two steps after the death of the coordinator", lambda: fleet.steps(run_id) >= done + 3, READY_S)
    say(f"the coordinator was killed and is back at step {fleet.steps(run_id)}")

    fleet.flotilla("run", "set", run_id, f"steps={fleet.steps(run_id) + 4}")
    wait_for("the end of the run", lambda: _state(fleet, run_id) not in ("running", "pending"), READY_S)
    shown = fleet.run_state(run_id)
    assert shown["state"] == "succeeded", f"{shown}\n{fleet.logs()}"
    say(f"{shown['step']} steps: {fleet.verdict(run_id)}")
    first, last = fleet.rewards(shown["directory"])
    say(f"mean reward of the first steps {first:.2f}, of the last ones {last:.2f}")
    assert last > first or ENGINE == "sim", "what the generators sample comes from what the trainer learns"


def _ready(fleet: Fleet, *, generators: int) -> bool:
    return len(fleet.available("generator")) >= generators and bool(fleet.available("reward"))


def _state(fleet: Fleet, run_id: str) -> str:
    try:
        return str(fleet.run_state(run_id)["state"])
    except (subprocess.CalledProcessError, ValueError):
        return "running"  # its coordinator does not answer: then it is not known to have ended
