"""A fleet on four hosts that share no folder: the run ends, and nothing is lost.

Each host is a mount namespace in which the folders of the others are empty. So what a service reads was fetched, and
what the coordinator keeps was fetched from the service that wrote it. Only a copy of the stack file and of the
credentials of the stack and of NATS is brought to a host by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import assert_accounted_for
from hosts.separate import READY_S, Hosts, run_file, separate_hosts

from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_testing.stack import wait_until

pytestmark = pytest.mark.timeout(300)

HOSTS = ("generator-0", "trainer", "reward-0", "another")


@pytest.fixture
def hosts(arithmetic: Path, tmp_path: Path) -> Iterator[Hosts]:
    with separate_hosts(arithmetic, tmp_path, HOSTS) as made:
        yield made


def start_all(hosts: Hosts) -> None:
    for name, kind in (("generator-0", "generator"), ("trainer", "trainer"), ("reward-0", "reward")):
        hosts.start(name, kind)
    hosts.wait_ready("generator-0", "trainer", "reward-0")


def test_a_run_on_four_hosts_without_a_shared_folder_loses_nothing(hosts: Hosts) -> None:
    start_all(hosts)
    assert "the model is not on this host" in hosts.log("generator-0")
    assert "the model is not on this host" in hosts.log("trainer")

    file = run_file(hosts.stack.directory.parents[1])
    finished = hosts.stack.run(file)
    assert finished["state"] == "succeeded", finished
    verdict = assert_accounted_for(hosts.stack, finished["run_id"])
    assert verdict.trained == 3 * 16, str(verdict)

    # What the trainer wrote is beside the coordinator, whole.
    directory = Path(finished["directory"])
    shelf = CheckpointShelf(directory / "checkpoints")
    assert shelf.names() == ["step-000002", "step-000003"]
    for name in shelf.names():
        Manifest.verified(shelf.folder(name))
    assert (directory / "model" / "model.safetensors").stat().st_size > 0
    # On its own host it kept the newest one alone.
    own = hosts.state("trainer") / "remote-runs" / "trainer" / finished["run_id"]
    assert CheckpointShelf(own / "checkpoints").names() == ["step-000002", "step-000003"]


def test_a_trainer_that_comes_back_on_a_new_host_goes_on_from_the_coordinators_checkpoint(
    hosts: Hosts,
) -> None:
    start_all(hosts)
    file = run_file(hosts.stack.directory.parents[1])
    run = hosts.stack.ok("run", "start", str(file), "steps=1000")
    shelf = CheckpointShelf(Path(run["directory"]) / "checkpoints")
    wait_until("two checkpoints beside the coordinator", lambda: len(shelf.names()) == 2, READY_S)

    hosts.end("trainer")
    hosts.start("trainer", "trainer", "another")
    hosts.wait_ready("trainer")
    wait_until("the run to go on", lambda: any(step["lineage"] for step in hosts.stack.metrics(run)), READY_S)
    with hosts.stack.client() as client:
        client.set_run(run["run_id"], [f"steps={client.get_run(run['run_id']).step + 2}"])
    wait_until("the end of the run", lambda: hosts.stack.state(run) != "running", READY_S)
    assert hosts.stack.state(run) == "succeeded"
    assert_accounted_for(hosts.stack, run["run_id"])
    fetched = [line for line in hosts.log("another").splitlines() if "fetched" in line]
    assert any("checkpoints/step-" in line for line in fetched), fetched
