"""An error names a state directory that cannot be used, whichever command or service would write there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flotilla_testing.small_disk import small_disk
from flotilla_testing.stack import FLOTILLA, Stack

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(params=["a file", "read-only"])
def wrong_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A state directory that cannot be one."""
    place = tmp_path / "state"
    if request.param == "a file":
        place.write_text("")
        yield place
        return
    if os.geteuid() != 0:
        pytest.skip("only root may mount a read-only disk")
    try:
        with small_disk(place, mib=4):
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            yield place
    except PermissionError as error:
        pytest.skip(str(error))


def test_a_state_directory_that_cannot_be_written_is_a_clear_error(
    wrong_place: Path, arithmetic: Path, tmp_path: Path
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(
        yaml.safe_dump({"name": "light", "model": str(arithmetic / "model"), "state_dir": str(wrong_place)})
    )
    stack = Stack(file, wrong_place / "light")
    coordinator = [str(Path(FLOTILLA).with_name("flotilla-coordinator")), "--stack", str(file)]
    started = subprocess.run(
        [*coordinator, "--nats", "nats://127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    up, doctor = stack.flotilla("up"), stack.flotilla("doctor")
    for text in (up.err, started.stderr, doctor.out):
        assert str(wrong_place) in text and "the state directory cannot be" in text, text
        assert "Traceback" not in text
    assert up.code == doctor.code == 5 and started.returncode == 1
    assert "FAIL  state directory" in doctor.out
    assert "Traceback" not in stack.flotilla("run", "list").err
