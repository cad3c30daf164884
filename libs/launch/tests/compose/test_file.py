"""The Compose file of a stack has a container for each row of its table, shares no folder and holds no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_core.config import StackConfig, load_text
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_launch.compose.engine import ComposeEngine
from flotilla_launch.compose.file import Project, check, contained, container_table, render, secrets_of
from flotilla_launch.gpus import Gpus
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import PlacedStack

STACK = """
name: chat
model: {folder}
state_dir: {folder}/state
bind: {{port: 7000}}
"""


def stack_of(folder: Path, more: str = "") -> StackConfig:
    return load_text(StackConfig, STACK.format(folder=folder) + more)


def rendered(folder: Path, more: str = "", *gpus: str) -> dict[str, Any]:
    directory = folder / "state" / "chat"
    stack = contained(stack_of(folder, more), directory)
    rows = container_table(stack, Gpus(gpus), directory)
    text = render(stack, rows, Project(directory, "m", "5:6"))
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    assert [*services] == [row.name for row in rows], "the containers are the rows of the table"
    return services


def test_a_container_runs_the_command_of_its_row_at_addresses_by_name(tmp_path: Path) -> None:
    services = rendered(tmp_path, "generator: {replicas: 2}\n")
    command = services["generator-1"]["command"]
    assert command[:2] == ["sh", "-c"] and command[4:] == [
        "/opt/flotilla/bin/flotilla-generator",
        *("--name", "generator-1", "--stack", f"{tmp_path}/state/chat/stack.yaml"),
        *("--nats", "tls://nats:4222", "--otlp", "https://coordinator:7000", "--port", "7070"),
    ]
    assert services["coordinator"]["command"][-2:] == ["--port", "7000"]
    assert services["nats"]["command"][4] == "/opt/flotilla/bin/nats-server"


def test_every_container_reads_the_credential_that_the_stack_file_names(tmp_path: Path) -> None:
    place, directory = f"{tmp_path}/credential.pem", tmp_path / "state" / "chat"
    named = load_text(StackConfig, STACK.format(folder=tmp_path), overrides=[f"bind.credential_file={place}"])
    stack = contained(named, directory)
    rows = container_table(stack, Gpus(()), directory)
    services = yaml.safe_load(render(stack, rows, Project(directory, "m", "5:6")))["services"]
    mount = {"type": "bind", "source": place, "target": place, "read_only": True}
    assert all(mount in described["volumes"] for described in services.values()), "that of NATS, too"


def test_the_health_check_of_an_image_finds_the_stack_file(tmp_path: Path) -> None:
    services = rendered(tmp_path)
    assert services["coordinator"]["environment"]["FLOTILLA_STACK"] == f"{tmp_path}/state/chat/stack.yaml"


def test_no_two_containers_write_to_one_folder(tmp_path: Path) -> None:
    services = rendered(tmp_path, f"generator: {{replicas: 2}}\ncompose: {{data: [{tmp_path}/data]}}\n")
    written = [
        volume["source"]
        for described in services.values()
        for volume in described["volumes"]
        if not volume.get("read_only")
    ]
    assert len(set(written)) == len(written) == len(services)
    hidden = f"{tmp_path}/state/chat/containers:mode=700"
    assert hidden in services["coordinator"]["tmpfs"], "the coordinator does not see those of the others"
    readers = [
        name
        for name, described in services.items()
        if f"{tmp_path}/data" in {volume["source"] for volume in described["volumes"]}
    ]
    assert readers == ["coordinator"]


def test_every_container_has_few_rights_and_the_user_who_calls(tmp_path: Path) -> None:
    for described in rendered(tmp_path).values():
        assert described["read_only"] and described["cap_drop"] == ["ALL"] and described["user"] == "5:6"
        assert "ports" not in described and described["restart"] == "on-failure:5"
    assert rendered(tmp_path, "restart_budget: 0\n")["trainer"]["restart"] == "no", "0 would be without end"


def test_secrets_are_not_in_the_file_and_texts_are_taken_as_they_are(tmp_path: Path) -> None:
    more = "generator: {environment: {HF_TOKEN: {environment: MINE}, PRICE: '5$'}}\n"
    environment = rendered(tmp_path, more)["generator-0"]["environment"]
    assert environment["HF_TOKEN"] == "${FLOTILLA_SECRET_generator_0_HF_TOKEN}"
    assert environment["PRICE"] == "5$$"
    rows = container_table(stack_of(tmp_path, more), Gpus(()), tmp_path)
    assert [name for _, name in secrets_of(rows).values()] == ["HF_TOKEN"]


def test_gpus_of_the_host_go_to_the_containers_that_have_them(tmp_path: Path) -> None:
    services = rendered(tmp_path, "trainer: {nproc: 2}\n", "0", "1", "2")
    given = {
        name: described["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, described in services.items()
        if "deploy" in described
    }
    assert given == {"trainer": ["0", "1"], "generator-0": ["2"]}
    assert services["trainer"]["image"].endswith("-gpu")
    assert not services["reward-0"]["image"].endswith("-gpu")


@pytest.mark.parametrize(
    "more",
    [
        "nats: {url: 'nats://elsewhere:4222', insecure: true}\n",
        "autoscale: {mode: act}\n",
        "placement: colocated\n",
        "trainer: {nproc: 2, hosts: [{name: a, ranks: 1}, {name: b, ranks: 1}]}\n",
        "reward: {attach: ['10.0.0.1:7070']}\n",
    ],
)
def test_what_containers_cannot_have_is_refused_by_name(tmp_path: Path, more: str) -> None:
    what = "hosts of a gang" if "hosts" in more else more.partition(":")[0]
    with pytest.raises(InvalidConfig, match=what):
        check(stack_of(tmp_path, more))


async def test_where_docker_is_missing_up_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    paths = StackPaths.of(tmp_path / "state", "chat")
    launcher = PlacedStack(paths, ComposeEngine(paths))
    with pytest.raises(FailedPrecondition, match="docker cannot be run"):
        await launcher.place(stack_of(tmp_path), on_progress=lambda _: None, on_wait=lambda _: None)
    assert not (tmp_path / "state").exists()
