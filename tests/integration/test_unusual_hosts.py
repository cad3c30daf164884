"""A fleet in a folder whose name no shell likes, under a locale of ASCII, by a user whose files others may read.

The engine is simulated, so that the fleet is up in seconds; services, NATS, ranks and weights are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run

pytestmark = pytest.mark.timeout(500)

FLOTILLA = str(Path(sys.executable).parent / "flotilla")
FOLDER = 'Zoë\'s 日本 "%41" \\ # 🚢'
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
COMMAND_S = 240


def open_to_others(folder: Path) -> list[str]:
    paths = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [str(path.relative_to(folder)) for path in paths if path.stat().st_mode & 0o077]


def test_a_fleet_trains_in_any_folder_and_locale_and_keeps_its_files_private(
    arithmetic: Path, tmp_path: Path
) -> None:
    assert any(path.stat().st_mode & 0o044 for path in (arithmetic / "model").iterdir()), (
        "the model is readable"
    )
    home = tmp_path / FOLDER
    home.mkdir()
    stack = {
        "name": "odd",
        "model": str(arithmetic / "model"),
        "state_dir": str(home / "state"),
        "generator": {"engine": "sim"},
    }
    file = home / "stack.yaml"
    file.write_text(yaml.safe_dump(stack, allow_unicode=True), "utf-8")

    def flotilla(*arguments: str) -> Any:
        command = [FLOTILLA, *arguments, "--stack", str(file), "--json"]
        done = subprocess.run(
            command, env=os.environ | ASCII, capture_output=True, timeout=COMMAND_S, check=False, umask=0o022
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout.decode()}\n{done.stderr.decode()}"
        return json.loads(done.stdout)

    try:
        flotilla("up")
        run = small_run(arithmetic, home / "run.yaml", name="odd", steps=1)
        ended = flotilla("run", "start", str(run), *MADE_UP_SAMPLES, "--wait")
        assert ended["state"] == "succeeded", ended
        written = [path for path in (home / "state").rglob("*") if path.is_file()]
        assert {"tokenizer.json", "config.json"} <= {path.name for path in written}, "a model was saved"
        assert open_to_others(home / "state") == []
    finally:
        flotilla("down")
    assert open_to_others(home / "state") == []
