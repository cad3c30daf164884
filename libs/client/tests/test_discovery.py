"""The coordinator and its credential are found by what lies in the directory of the stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_client import find_coordinator
from flotilla_core.errors import Unavailable
from flotilla_testing.credentials import credential


def announced(directory: Path, **more: str) -> None:
    (directory / "instances").mkdir(parents=True)
    entry = {"address": "coordinator:7070", **more}
    (directory / "instances" / "coordinator.json").write_text(json.dumps(entry))


def found(directory: Path) -> Path:
    return find_coordinator("far", directory).credential.path


def test_a_coordinator_without_a_launcher_says_where_its_credential_is(tmp_path: Path) -> None:
    file = credential(tmp_path).path
    announced(tmp_path / "far", credential_file=str(file))
    assert find_coordinator("far", tmp_path).address == "coordinator:7070"
    assert found(tmp_path) == file


def test_the_file_of_the_stack_decides_where_there_is_one(tmp_path: Path) -> None:
    file = credential(tmp_path).path
    announced(tmp_path / "far", credential_file=str(tmp_path / "nowhere"))
    (tmp_path / "far" / "stack.yaml").write_text(f"bind: {{credential_file: {file}}}\n")
    assert found(tmp_path) == file


def test_a_variable_of_the_environment_comes_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced(tmp_path / "far", credential_file=str(tmp_path / "nowhere"))
    file = credential(tmp_path).path
    monkeypatch.setenv("FLOTILLA_CREDENTIAL_FILE", str(file))
    assert found(tmp_path) == file


def test_where_nothing_says_it_the_credential_is_that_of_the_stack(tmp_path: Path) -> None:
    announced(tmp_path / "far")
    with pytest.raises(Unavailable, match="has no credential"):
        find_coordinator("far", tmp_path)
    assert credential(tmp_path / "far").path == found(tmp_path)


def test_an_address_that_the_launcher_reserved_is_taken_until_the_coordinator_announces_itself(
    tmp_path: Path,
) -> None:
    (tmp_path / "far").mkdir()
    credential(tmp_path / "far")
    (tmp_path / "far" / "launcher.json").write_text('{"otlp": "https://10.0.0.1:7070"}')
    assert find_coordinator("far", tmp_path).address == "10.0.0.1:7070"


def test_where_this_host_has_no_address_of_the_coordinator_the_error_says_how_a_command_runs_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "placed.json").write_text('{"reach": "kubectl exec -i c-0 -- flotilla"}')
    with pytest.raises(Unavailable) as refused:
        find_coordinator("far", tmp_path)
    assert "kubectl exec -i c-0 -- flotilla COMMAND" in refused.value.next_step
