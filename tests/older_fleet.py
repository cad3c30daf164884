"""A fleet that goes on where an older version stopped, with certificates, which that one did not have.

`contract/paused_run/make.py` made the state directory, in a checkout of 26449ff. All services are real but for the
engine; the launcher listens on a port as well.
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

from flotilla_core.config.stack import TlsConfig
from flotilla_core.trust import certificates
from flotilla_launch.placement import reserve_port
from flotilla_testing.stack import Stack, running_stack, wait_until

STATE = Path(__file__).parent / "contract" / "paused_run" / "state.tar.xz"
OVERLAP_S = 4.0
LAUNCHER_PORT = reserve_port("127.0.0.1")


@dataclass(frozen=True)
class OlderFleet:
    """The fleet, once the run that the older version paused has ended."""

    stack: Stack
    tls: TlsConfig
    paused: dict[str, Any]
    """The run as this version found it."""
    ended: dict[str, Any]
    """The run after it was resumed."""


def tls_in(folder: Path) -> TlsConfig:
    return TlsConfig(
        certificate_file=folder / "certificate.pem", key_file=folder / "key.pem", ca_file=folder / "ca.pem"
    )


@contextlib.contextmanager
def older_fleet(folder: Path) -> Iterator[OlderFleet]:
    """Start this version on the state of the older one, and resume its run."""
    older = _unpacked(folder)
    tls = tls_in(certificates.make_certificates(folder / "certs", ["a"])[0])
    described = yaml.safe_load((older / "stack.yaml").read_text()) | {
        "model": str(older / "model"),
        "state_dir": str(older / "state"),
        "bind": {"tls": tls.model_dump(mode="json"), "token_overlap_s": OVERLAP_S},
        "launcher": {"port": LAUNCHER_PORT},
    }
    with running_stack(described, older) as stack:
        (paused,) = stack.ok("run", "list")["runs"]
        wait_until("the run under the new coordinator", lambda: stack.state(paused) == "paused")
        stack.ok("run", "resume", paused["run_id"])
        wait_until("the end of the run", lambda: stack.state(paused) not in ("running", "paused"))
        yield OlderFleet(stack, tls, paused, stack.ok("run", "show", paused["run_id"]))


def _unpacked(folder: Path) -> Path:
    """Move the folder of the older version into `folder`: the paths in it follow."""
    with tarfile.open(STATE) as archive:
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
