"""A run that an older version paused goes on from its checkpoint: ledger, run folder and checkpoints stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from accounts import assert_accounted_for
from older_fleet import OlderFleet, older_fleet

STEPS = 10
CHECKPOINT = 3

pytestmark = pytest.mark.timeout(120)


def test_a_run_that_an_older_version_paused_is_resumed(older: OlderFleet, tmp_path: Path) -> None:
    assert_resumed(older)
    with older_fleet(tmp_path, "e99b5b16") as fleet:
        assert_resumed(fleet)


def assert_resumed(older: OlderFleet) -> None:
    paused, ended = older.paused, older.ended
    assert paused["state"] == "paused" and CHECKPOINT < paused["step"] < STEPS
    assert (ended["state"], ended["step"]) == ("succeeded", STEPS), ended["reason"]
    # The steps after the checkpoint were made again, under the next lineage.
    assert ended["policy_version"] == f"1.{STEPS}"
    assert_accounted_for(older.stack, paused["run_id"])


def test_what_guarded_an_older_version_is_refused_with_the_way_and_left_as_it_is(older: OlderFleet) -> None:
    (said,) = older.refused.splitlines()
    assert "bind: token_file is a key of an older Flotilla" in said and "credential_file" in said, said
    # Its secret opens nothing any more, and nobody is surprised by the loss of a file.
    assert (older.stack.directory / "token").read_text().strip() == "0" * 64
    made = {name: older.stack.directory / name for name in ("authority.pem", "credential.pem")}
    assert {name: file.stat().st_mode & 0o777 for name, file in made.items()} == dict.fromkeys(made, 0o600)
