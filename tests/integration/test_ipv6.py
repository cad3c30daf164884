"""A fleet on a host that has IPv6 alone: a network namespace where there may be one, else a stack that is bound to ::1.

The engine is simulated, so that the fleet is up in seconds; services, NATS, the two ranks and the weights are real.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_core.addresses import has_ipv6
from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run

pytestmark = pytest.mark.timeout(500)

FLOTILLA = str(Path(sys.executable).parent / "flotilla")
UP_S = 240


@contextlib.contextmanager
def ipv6_alone() -> Iterator[list[str]]:
    """Yield what to put before a command, so that it has no IPv4; nothing where this system makes no namespaces."""
    name = f"flt-{secrets.token_hex(3)}"
    inside = ["ip", "netns", "exec", name]
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        yield []
        return
    try:
        for command in ("ip link set lo up", "ip address delete 127.0.0.1/8 dev lo"):
            subprocess.run([*inside, *command.split()], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_a_fleet_without_ipv4_trains(arithmetic: Path, tmp_path: Path) -> None:
    with ipv6_alone() as inside:
        file = tmp_path / "stack.yaml"
        stack: dict[str, Any] = {
            "name": "six",
            "model": str(arithmetic / "model"),
            "state_dir": str(tmp_path / "state"),
            "generator": {"engine": "sim"},
            "trainer": {"nproc": 2},
            # The default of a host without IPv4.
            **({} if inside else {"bind": {"host": "::1"}}),
        }
        file.write_text(yaml.safe_dump(stack))

        def flotilla(*arguments: str) -> Any:
            command = [*inside, FLOTILLA, *arguments, "--stack", str(file), "--json"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=UP_S, check=False)
            assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
            return json.loads(done.stdout)

        try:
            flotilla("up")
            addresses = [
                one["address"]
                for one in flotilla("ps")["processes"]
                if one["name"] not in ("nats", "launcher")
            ]
            assert len(addresses) == 4 and all(one.startswith("[::1]:") for one in addresses), addresses
            run = small_run(arithmetic, tmp_path / "run.yaml", name="six", steps=1)
            ended = flotilla("run", "start", str(run), *MADE_UP_SAMPLES, "--wait")
            assert ended["state"] == "succeeded", ended
        finally:
            flotilla("down")
