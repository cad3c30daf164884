"""A fleet without IPv4, in a folder whose name no shell likes, under a locale of ASCII, whose files others may read.

The engine is simulated, so that the fleet is up in seconds; services, NATS, the two ranks and weights are real. The
host without IPv4 is a network namespace where there may be one, else the stack is bound to ::1; a host without IPv6
shows the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
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
FOLDER = 'Zoë\'s 日本 "%41" \\ # 🚢'
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
COMMAND_S = 240


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


def open_to_others(folder: Path) -> list[str]:
    paths = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [str(path.relative_to(folder)) for path in paths if path.stat().st_mode & 0o077]


def test_a_fleet_trains_without_ipv4_in_any_folder_and_locale_and_keeps_its_files_private(
    arithmetic: Path, tmp_path: Path
) -> None:
    assert any(path.stat().st_mode & 0o044 for path in (arithmetic / "model").iterdir()), (
        "the model is readable"
    )
    home = tmp_path / FOLDER
    home.mkdir()
    with ipv6_alone() if has_ipv6() else contextlib.nullcontext([]) as inside:
        stack = {
            "name": "odd",
            "model": str(arithmetic / "model"),
            "state_dir": str(home / "state"),
            "generator": {"engine": "sim"},
            "trainer": {"nproc": 2},
            # The default of a host without IPv4.
            **({"bind": {"host": "::1"}} if has_ipv6() and not inside else {}),
        }
        file = home / "stack.yaml"
        file.write_text(yaml.safe_dump(stack, allow_unicode=True), "utf-8")

        def flotilla(*arguments: str) -> Any:
            command = [*inside, FLOTILLA, *arguments, "--stack", str(file), "--json"]
            done = subprocess.run(
                command,
                env=os.environ | ASCII,
                capture_output=True,
                timeout=COMMAND_S,
                check=False,
                umask=0o022,
            )
            assert done.returncode == 0, f"{arguments}: {done.stdout.decode()}\n{done.stderr.decode()}"
            return json.loads(done.stdout)

        try:
            flotilla("up")
            shown = (one for one in flotilla("ps")["processes"] if one["name"] not in ("nats", "launcher"))
            addresses = [one["address"] for one in shown]
            assert len(addresses) == 4
            assert all(one.startswith("[::1]:") == has_ipv6() for one in addresses), addresses
            run = small_run(arithmetic, home / "run.yaml", name="odd", steps=1)
            ended = flotilla("run", "start", str(run), *MADE_UP_SAMPLES, "--wait")
            assert ended["state"] == "succeeded", ended
            written = [path for path in (home / "state").rglob("*") if path.is_file()]
            assert {"tokenizer.json", "config.json"} <= {path.name for path in written}, "a model was saved"
            assert open_to_others(home / "state") == []
        finally:
            flotilla("down")
    assert open_to_others(home / "state") == []
