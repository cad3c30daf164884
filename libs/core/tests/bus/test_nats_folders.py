"""The stack's own NATS server keeps its files in whatever folder a user has, and takes the credential from there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flotilla_core.bus import Bus, NatsServer
from flotilla_core.disk import check_state_directory
from flotilla_core.errors import FailedPrecondition
from flotilla_testing.credentials import credential

NAMES = (
    "with a space",
    " and around ",
    "Müller",
    "日本",
    "ship 🚢",
    "e\u0301",
    'double " quote',
    "single ' quote",
    "back\\slash",
    "percent %41",
    "dollar $HOME",
    "hash # and ; { [ (",
    os.fsdecode(b"latin \xfc"),
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_a_server_starts_in_any_folder(tmp_path: Path, name: str) -> None:
    server = await NatsServer.start(tmp_path / name / "nats", credential=credential(tmp_path / name))
    try:
        bus = await Bus.connect(server.url, server.login)
        await bus.close()
    finally:
        await server.stop()
    assert (tmp_path / name / "nats" / "jetstream").is_dir()
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["new\nline", "tab\there", "bell\a", "delete\x7f"], ids=ascii)
def test_a_state_directory_with_a_control_character_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(FailedPrecondition, match="control character") as refused:
        check_state_directory(tmp_path / name)
    assert str(refused.value).isprintable()
    assert not (tmp_path / name).exists()
