"""A run copies its checkpoints to object storage, and goes on from there on a host that has nothing of it.

The storage is a folder by its file:// address; the engine is simulated, and the trainer accepts every update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.runs import QUICK, example_rows, run_on, written

pytest.importorskip("torch", reason="fleets need the whole environment: make test-storage")

from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(900)

WAIT_S = 180.0


def run_file(arithmetic: Path, folder: Path, copy_to: str) -> Path:
    checkpoint = {"every_steps": 2, "keep": 1, "copy_to": copy_to}
    run = run_on(example_rows(arithmetic), "copied", 40, (2, 2, 4), checkpoint=checkpoint, **QUICK)
    return written(folder, run)


def whole(copies: Path) -> list[str]:
    return sorted(manifest.parent.name for manifest in copies.glob("step-*/manifest.json"))


def lines_of(stack: Stack, run: dict[str, Any]) -> list[int]:
    return [int(line["step"]) for line in stack.metrics(run)]


def test_a_run_goes_on_from_its_copy_on_another_host(arithmetic: Path, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    model = f"file://{arithmetic}/model"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with light_stack(model, tmp_path / "first", trainer_s=0.2) as stack:
        run = stack.ok("run", "start", str(run_file(arithmetic, tmp_path, f"file://{bucket}")))
        copies = bucket / run["run_id"]
        wait_until("a whole copy", lambda: len(whole(copies)) > 0, WAIT_S)
        stack.stop_run(run, WAIT_S)
        newest = whole(copies)[-1]
        assert (
            newest == sorted(path.name for path in Path(run["directory"], "checkpoints").glob("step-*"))[-1]
        )
    done = int(newest.removeprefix("step-"))
    with light_stack(model, tmp_path / "second") as other:
        place = f"file://{copies}"
        resumed = other.ok("run", "resume", place, "--wait")
        assert (resumed["run_id"], resumed["state"], resumed["step"]) == (run["run_id"], "succeeded", 40)
        assert lines_of(other, resumed) == list(range(done, 40))
        assert {int(line["lineage"]) for line in other.metrics(resumed)} == {1}
        verdict = check(other.directory / "ledger.sqlite", run["run_id"])
        assert verdict.lost == verdict.trained_twice == verdict.unexpected == 0, verdict
        again = other.flotilla("run", "resume", place)
        assert again.code != 0 and f"run {run['run_id']} is on this stack already" in again.err
        nothing = other.flotilla("run", "resume", f"file://{bucket}/another")
        assert nothing.code != 0 and "no such bucket or folder" in nothing.err
