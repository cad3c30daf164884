"""Generators and rewards are replaced one by one under a run, by a release that speaks the protocol beside ours.

The other release is an environment of its own: our packages, with another number in `flotilla_core.protocol`. All else
is real but the engine, which is simulated, and the trainer, which accepts every update.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_core.protocol import OLDEST, PROTOCOL_VERSION, major_of
from flotilla_testing.extra_generator import NAME as EXTRA
from flotilla_testing.extra_generator import extra_generator
from flotilla_testing.runs import endless_run
from flotilla_testing.stack import FLOTILLA, Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(900)

WAIT_S = 180.0
GENERATORS, REWARDS = 2, 2
COMMANDS = ("flotilla", "flotilla-generator", "flotilla-reward", "flotilla-coordinator")


def release(folder: Path, protocol: str) -> Path:
    """Make an environment with a release that speaks this protocol; return the folder of its commands."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    ours = sysconfig.get_path("purelib")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    text = f"import flotilla_core.protocol\n\nflotilla_core.protocol.PROTOCOL_VERSION = {protocol!r}\n"
    (packages / "sitecustomize.py").write_text(text)
    commands = folder / "bin"
    for name in COMMANDS:
        lines = (Path(sys.executable).parent / name).read_text().splitlines(keepends=True)
        (commands / name).write_text("".join([f"#!{commands / 'python'}\n", *lines[1:]]))
        (commands / name).chmod(0o700)
    return commands


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("newer"), f"{(major_of(PROTOCOL_VERSION) or 0) + 1}.0")


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("upgraded")
    sim = {"seconds_per_token": 0.01}
    with light_stack(
        arithmetic / "model", directory, trainer_s=0.05, replicas=GENERATORS, sim=sim
    ) as running:
        running.ok("scale", "reward", str(REWARDS))
        yield running


def upgraded(stack: Stack, commands: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `flotilla upgrade` of a release on the stack."""
    command = [str(commands / "flotilla"), "upgrade", kind, *options, "--stack", str(stack.file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def protocols(stack: Stack, kind: str) -> dict[str, str]:
    """Return the protocol version of each replica in the registry, by name."""
    with stack.client() as client:
        services = [one.registration for one in client.list_services()]
    return {one.name: one.protocol_version for one in services if one.name.startswith(f"{kind}-")}


def commands_of(stack: Stack, name: str) -> str:
    return " ".join(stack.process(name).cmdline())


def notices(run: dict[str, Any]) -> list[str]:
    lines = Path(run["directory"], "events.jsonl").read_text().splitlines()
    return [event["notice"]["text"] for event in map(json.loads, lines) if "notice" in event]


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[dict[str, Any]]:
    """Start a run, and stop it: nothing was lost or trained twice, and it never waited for a generator or a reward."""
    file = endless_run(stack, prompts=8, samples=2, max_staleness=1, longest_response=12)
    run: dict[str, Any] = stack.ok("run", "start", str(file))
    try:
        wait_until("two steps", lambda: len(stack.metrics(run)) > 2, WAIT_S)
        yield run
    finally:
        stack.stop_run(run, WAIT_S)
    sys.stdout.write(f"\n{assert_accounted_for(stack, run['run_id'])}\n")
    assert [text for text in notices(run) if "waiting for" in text] == []


def test_each_generator_is_replaced_by_one_of_the_protocol_after_ours(fleet: Stack, newer: Path) -> None:
    commands, other = newer, f"{(major_of(PROTOCOL_VERSION) or 0) + 1}.0"
    expected = {f"generator-{index}": other for index in range(GENERATORS)}
    with running(fleet) as run:
        before = len(fleet.metrics(run))
        outcome = upgraded(fleet, commands, "generator")
        assert outcome.returncode == 0, outcome.stderr
        wait_until("both in the registry", lambda: protocols(fleet, "generator") == expected, WAIT_S)
        assert all(str(commands) in commands_of(fleet, name) for name in expected)
        wait_until(
            "samples of both",
            lambda: all(f"generator/{name}/samples" in fleet.metrics(run)[-1] for name in expected),
            WAIT_S,
        )
        during = fleet.metrics(run)[before:]
        sys.stdout.write(f"\n{len(during)} steps while {GENERATORS} generators were replaced\n")
        assert len(during) > GENERATORS
        work = {one["name"]: one for one in fleet.ok("replicas", "list")["replicas"]}
        assert work["generator-0"]["work"] == "ready"


@pytest.mark.parametrize(
    "major",
    [(major_of(PROTOCOL_VERSION) or 0) + 2, OLDEST - 1],
    ids=["two after ours", "before every call showed a certificate"],
)
def test_a_generator_of_a_protocol_that_is_not_ours_is_refused_by_name_and_costs_the_run_nothing(
    fleet: Stack, tmp_path: Path, major: int
) -> None:
    far = f"{major}.0"
    commands = release(tmp_path / "far", far)
    with (
        running(fleet) as run,
        extra_generator(fleet, tmp_path, {}, command=(str(commands / "flotilla-generator"),)),
    ):

        def listed() -> dict[str, Any] | None:
            found = [one for one in fleet.ok("replicas", "list")["replicas"] if one["name"] == EXTRA]
            return found[0] if found else None

        wait_until("the extra generator in the list", lambda: listed() is not None, WAIT_S)
        shown = listed()
        assert shown is not None and shown["work"] == "ejected"
        assert f"speaks protocol {far}, this build speaks {PROTOCOL_VERSION}" in shown["why"]
        steps = len(fleet.metrics(run))
        wait_until("three more steps", lambda: len(fleet.metrics(run)) > steps + 3, WAIT_S)
        assert not any(f"generator/{EXTRA}/samples" in step for step in fleet.metrics(run))


def test_rewards_are_replaced_in_the_same_way(fleet: Stack, newer: Path) -> None:
    with running(fleet):
        outcome = upgraded(fleet, newer, "reward")
        assert outcome.returncode == 0, outcome.stderr
        assert str(newer) in commands_of(fleet, "reward-0") and str(newer) in commands_of(fleet, "reward-1")


def test_a_release_that_does_not_start_costs_no_replica(fleet: Stack, tmp_path: Path) -> None:
    commands = release(tmp_path / "broken", PROTOCOL_VERSION)
    broken = commands / "flotilla-generator"
    broken.write_text(f"#!{commands / 'python'}\nraise SystemExit('error: no such engine')\n")
    with running(fleet):
        pids = [fleet.process(f"generator-{index}").pid for index in range(GENERATORS)]
        outcome = upgraded(fleet, commands, "generator")
        assert outcome.returncode != 0 and "generator-2 did not start" in outcome.stderr
        assert [fleet.process(f"generator-{index}").pid for index in range(GENERATORS)] == pids
        replicas = {one["name"]: one["work"] for one in fleet.ok("replicas", "list")["replicas"]}
        assert {name for name, work in replicas.items() if work == "ready" and "generator" in name} == {
            f"generator-{index}" for index in range(GENERATORS)
        }


def test_what_a_run_has_once_is_not_replaced(fleet: Stack) -> None:
    outcome = upgraded(fleet, Path(FLOTILLA).parent, "trainer")
    assert outcome.returncode != 0
    assert "'trainer' cannot be replaced under a run" in outcome.stderr and "flotilla down" in outcome.stderr
