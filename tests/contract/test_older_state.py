"""A run that an older version paused goes on from its checkpoint: ledger, run folder and checkpoints stay readable."""

from __future__ import annotations

import pytest
from accounts import assert_accounted_for
from older_fleet import OlderFleet

STEPS = 10
CHECKPOINT = 3

pytestmark = pytest.mark.timeout(120)


def test_a_run_that_an_older_version_paused_is_resumed(older: OlderFleet) -> None:
    paused, ended = older.paused, older.ended
    assert paused["state"] == "paused" and CHECKPOINT < paused["step"] < STEPS
    assert (ended["state"], ended["step"]) == ("succeeded", STEPS), ended["reason"]
    # The steps after the checkpoint were made again, under the next lineage.
    assert ended["policy_version"] == f"1.{STEPS}"
    assert_accounted_for(older.stack, paused["run_id"])
