"""The disk of a stack fills up at a random write of a run, again and again: the run pauses, says why, and goes on.

Simulated engine, everything else real; where no checkpoint is struck the trainer accepts whatever comes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import assert_accounted_for
from safetensors.torch import load_file

from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_testing.coordinator_faults import endless_run
from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run
from flotilla_testing.small_disk import LIMIT_S, STEPS, RunOnDisk, SmallDisk, small_disk
from flotilla_testing.stack import Stack, sim_stack, wait_until

pytestmark = pytest.mark.timeout(900)

STRIKES = 20
MIB = 1 << 20
"""A checkpoint of the example's model has 12 of them and an export 3; samples and ledger a few KiB a step."""


def test_a_run_on_a_full_disk_pauses_and_goes_on_by_itself_twenty_times(
    fleet: Stack, disk: SmallDisk, arithmetic: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)), STEPS)
    full = RunOnDisk(fleet, disk, run, seed)
    wait_until("two steps", lambda: full.steps >= 2, LIMIT_S)
    for strike in range(1, STRIKES + 1):
        noticed_s = full.fill()
        text = full.now().reason
        went_on_s = full.free()
        verdict = assert_accounted_for(fleet, run["run_id"])
        sys.stdout.write(
            f"strike {strike}: after step {full.steps}, paused in {noticed_s:.1f} s, "
            f"two more steps {went_on_s:.1f} s after space was freed, {verdict}: {text}\n"
        )
    fleet.stop_run(run, LIMIT_S)
    sys.stdout.write(f"{assert_accounted_for(fleet, run['run_id'])}\n")
    steps = [step["step"] for step in fleet.metrics(run)]
    assert steps == list(range(len(steps))), "a step was made twice"
    directory = RunDirectory(Path(run["directory"]))
    assert {int(sample["step"]) for sample in directory.read_samples()} == set(steps)
    sequences = [event["sequence"] for event in directory.read_events()]
    assert sequences == [str(number) for number in range(1, len(sequences) + 1)], "an event was lost"


@pytest.fixture(scope="module")
def learning_fleet(
    tmp_path_factory: pytest.TempPathFactory, arithmetic: Path
) -> Iterator[tuple[Stack, SmallDisk]]:
    """Real ranks, whose checkpoints and exports have weights."""
    folder = tmp_path_factory.mktemp("weights")
    try:
        with small_disk(folder / "state", mib=256) as disk, sim_stack(arithmetic / "model", folder) as fleet:
            yield fleet, disk
            disk.free()
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("struck", "room", "settings"),
    [
        ("checkpoint", 2 * MIB, ["steps=20", "checkpoint.every_steps=2"]),
        # The checkpoint at the end fits, and the export after it does not.
        ("model", 14 * MIB, ["steps=6", "checkpoint.every_steps=1000", "export_final=true"]),
    ],
)
def test_weights_that_do_not_fit_wait_for_room_and_are_written_whole(
    learning_fleet: tuple[Stack, SmallDisk],
    arithmetic: Path,
    tmp_path: Path,
    struck: str,
    room: int,
    settings: list[str],
) -> None:
    fleet, disk = learning_fleet
    file = small_run(arithmetic, tmp_path / "run.yaml", name=struck)
    run = RunOnDisk(fleet, disk, fleet.ok("run", "start", str(file), *MADE_UP_SAMPLES, *settings))
    wait_until("a step", lambda: run.steps >= 1, LIMIT_S)

    reasons = [""]

    def waits() -> bool:
        """Look whether what does not fit is named: until its writer gives up, it leaves the ledger no room either."""
        disk.fill(room)
        reasons.append(run.now().reason if run.waits() else "")
        return f"the {struck} cannot be written" in reasons[-1]

    wait_until(f"the {struck} to wait for disk space", waits, LIMIT_S)
    sys.stdout.write(f"{struck} after step {run.steps}: {reasons[-1]}\n")
    assert str(disk.path) in reasons[-1], reasons
    disk.free()
    ended = fleet.ok("run", "watch", run.run["run_id"])
    assert ended["state"] == "succeeded", ended["reason"]
    sys.stdout.write(f"{assert_accounted_for(run.fleet, run.run['run_id'])}\n")
    directory = Path(ended["directory"])
    if struck == "model":
        exported, made = (
            set(load_file(model / "model.safetensors"))
            for model in (directory / "model", arithmetic / "model")
        )
        assert exported == made
    else:
        shelf = CheckpointShelf(directory / "checkpoints")
        assert [Manifest.verified(shelf.folder(name)).nbytes > 0 for name in shelf.names()] == [True, True]
