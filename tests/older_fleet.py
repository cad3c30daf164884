"""A fleet that goes on where an older version stopped, by an authority of its own, which that one did not have.

`contract/paused_run/make.py` made the state directories, in checkouts of the versions that name them. All services are
real but for the engine.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.trust import write_secret
from flotilla_launch.placement import reserve_port
from flotilla_testing.stack import Stack, running_stack, wait_until

STATES = Path(__file__).parent / "contract" / "paused_run"
LAUNCHER_PORT = reserve_port("127.0.0.1")


@dataclass(frozen=True)
class OlderFleet:
    """The fleet, once the run that the older version paused has ended."""

    stack: Stack
    refused: str
    """The answer to the first `up`, whose stack file named the secret that guarded older versions."""
    paused: dict[str, Any]
    """The run as this version found it."""
    ended: dict[str, Any]
    """The run after it was resumed."""


@contextlib.contextmanager
def older_fleet(folder: Path, version: str, **described: Any) -> Iterator[OlderFleet]:
    """Start this version on the state of the older one, by a stack file that says more, and resume its run."""
    older = _unpacked(folder, STATES / f"{version}.tar.xz")
    write_secret(older / "state" / "sim" / "token", "0" * 64)
    described |= yaml.safe_load((older / "stack.yaml").read_text())
    described |= {"model": str(older / "model"), "state_dir": str(older / "state")}
    guarded = folder / "guarded.yaml"
    guarded.write_text(yaml.safe_dump(described | {"bind": {"token_file": "token"}}))
    refused = Stack(guarded, older / "state" / "sim").flotilla("up")
    assert refused.code != 0
    with running_stack(described, older) as stack:
        (found,) = stack.ok("run", "list")["runs"]
        wait_until("the run under the new coordinator", lambda: stack.state(found) == "paused")
        paused = stack.ok("run", "show", found["run_id"])
        stack.ok("run", "resume", paused["run_id"])
        wait_until("the end of the run", lambda: stack.state(paused) not in ("running", "paused"))
        yield OlderFleet(stack, refused.err, paused, stack.ok("run", "show", paused["run_id"]))


def _unpacked(folder: Path, state: Path) -> Path:
    """Move the folder of the older version into `folder`: the paths in it follow."""
    with tarfile.open(state) as archive:
        archive.extractall(folder, filter="data")
    (older,) = folder.iterdir()
    was = Path(yaml.safe_load((older / "stack.yaml").read_text())["model"]).parent
    with contextlib.closing(sqlite3.connect(older / "state" / "sim" / "ledger.sqlite")) as ledger, ledger:
        for column in ("config_yaml", "directory"):
            ledger.execute(f"UPDATE runs SET {column} = replace({column}, ?, ?)", (str(was), str(older)))
    for file in (older / "state" / "sim").rglob("*"):
        if file.suffix in (".yaml", ".json") and "checkpoints" not in file.parts:
            file.write_text(file.read_text().replace(str(was), str(older)))
    return older
