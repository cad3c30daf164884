"""The coordinator and its token are found by what lies in the directory of the stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_client import find_coordinator
from flotilla_core.errors import Unavailable
from flotilla_core.trust import TokenFile


def announced(directory: Path, **more: str) -> None:
    (directory / "instances").mkdir(parents=True)
    entry = {"address": "coordinator:7070", **more}
    (directory / "instances" / "coordinator.json").write_text(json.dumps(entry))


def secret(path: Path) -> Path:
    path.write_text("word\n")
    path.chmod(0o600)
    return path


def token(directory: Path) -> str:
    found = find_coordinator("far", directory).token
    assert isinstance(found, TokenFile)
    return found.current()


def test_a_coordinator_without_a_launcher_says_where_its_token_is(tmp_path: Path) -> None:
    announced(tmp_path / "far", token_file=str(secret(tmp_path / "secret")))
    assert find_coordinator("far", tmp_path).address == "coordinator:7070"
    assert token(tmp_path) == "word"


def test_the_file_of_the_stack_decides_where_there_is_one(tmp_path: Path) -> None:
    announced(tmp_path / "far", token_file=str(tmp_path / "nowhere"))
    (tmp_path / "far" / "stack.yaml").write_text(f"bind: {{token_file: {secret(tmp_path / 'secret')}}}\n")
    assert token(tmp_path) == "word"


def test_where_neither_says_it_the_token_is_that_of_the_stack(tmp_path: Path) -> None:
    announced(tmp_path / "far")
    with pytest.raises(Unavailable, match="has no token"):
        find_coordinator("far", tmp_path)
    secret(tmp_path / "far" / "token")
    assert token(tmp_path) == "word"


def test_where_this_host_has_no_address_of_the_coordinator_the_error_says_how_a_command_runs_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "placed.json").write_text('{"reach": "kubectl exec -i c-0 -- flotilla"}')
    with pytest.raises(Unavailable) as refused:
        find_coordinator("far", tmp_path)
    assert "kubectl exec -i c-0 -- flotilla COMMAND" in refused.value.next_step
