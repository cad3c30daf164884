"""A run that an older version paused goes on from its checkpoint: ledger, run directory and checkpoints stay readable.

`paused_run/make.py` made the state directory, in a checkout of 26449ff.
"""

from __future__ import annotations

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.stack import running_stack, wait_until

STATE = Path(__file__).parent / "paused_run" / "state.tar.xz"
STEPS = 10
CHECKPOINT = 3

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The folder of the older version, moved to `tmp_path`: the paths in it follow."""
    with tarfile.open(STATE) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    was = Path(yaml.safe_load((folder / "stack.yaml").read_text())["model"]).parent
    with closing(sqlite3.connect(folder / "state" / "sim" / "ledger.sqlite")) as ledger, ledger:
        for column in ("config_yaml", "directory"):
            ledger.execute(f"UPDATE runs SET {column} = replace({column}, ?, ?)", (str(was), str(folder)))
    for file in (folder / "state" / "sim").rglob("*"):
        if file.suffix in (".yaml", ".json") and "checkpoints" not in file.parts:
            file.write_text(file.read_text().replace(str(was), str(folder)))
    return folder


def test_a_run_that_an_older_version_paused_is_resumed(older: Path) -> None:
    stack_file = yaml.safe_load((older / "stack.yaml").read_text())
    description = {name: stack_file[name] for name in ("name", "generator")} | {"model": str(older / "model")}
    with running_stack(description, older) as stack:
        (paused,) = stack.ok("run", "list")["runs"]
        assert paused["state"] == "paused" and CHECKPOINT < paused["step"] < STEPS
        wait_until("the run under the new coordinator", lambda: stack.state(paused) == "paused")
        stack.ok("run", "resume", paused["run_id"])
        wait_until("the end of the run", lambda: stack.state(paused) not in ("running", "paused"))
        ended = stack.ok("run", "show", paused["run_id"])
        assert (ended["state"], ended["step"]) == ("succeeded", STEPS), ended["reason"]
        # The steps after the checkpoint were made again, under the next lineage.
        assert ended["policy_version"] == f"1.{STEPS}"
    verdict = check(stack.directory / "ledger.sqlite", paused["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)
