"""What fails in a rank reaches a user in its parts: by the notice, the ledger and the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, SEVERITY_WARNING
from flotilla_coordinator.ledger import queries
from flotilla_coordinator.ledger.schema import connect_read_only
from flotilla_core.findings import parts_of, text_of
from flotilla_testing.runs import REWARD, small_run
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(180)

# The ranks of the first session die, and those of the second one refuse it.
LOSS = """
import os, pathlib, signal

DIED = pathlib.Path(__file__).with_suffix(".died")
if DIED.exists():
    raise RuntimeError("no loss today")

def loss(tokens):
    DIED.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_error_of_a_rank_arrives_in_its_parts(gangs: Stack, arithmetic: Path, tmp_path: Path) -> None:
    reward, loss = tmp_path / "reward.py", f"{tmp_path}/loss.py:loss"
    reward.write_text(REWARD)
    (tmp_path / "loss.py").write_text(LOSS)
    file = small_run(arithmetic, tmp_path / "run.yaml", steps=1, reward=f"{reward}:reward")
    # The simulated engine's log-probabilities are not those of any policy.
    made_up = ("algorithm.correction.fail_at=null", "weights.canary.prompts=0")
    run = gangs.run(file, f"algorithm.loss.type={loss}", *made_up)
    assert run["state"] == "failed"

    shown = gangs.ok("run", "show", run["run_id"])
    told = shown["finding"]
    assert (told["severity"], told["code"]) == ("error", "user_code")
    assert told["what"] == "RuntimeError in code of yours" and told["where"] == loss
    assert (
        told["why"] == "no loss today" and told["next_step"] == "call the function by hand with a small input"
    )
    with contextlib.closing(connect_read_only(gangs.directory / "ledger.sqlite")) as db:
        recorded = queries.run(db, run["run_id"]).reason
    assert parts_of(recorded) == {**told, "severity": SEVERITY_ERROR}
    assert run["reason"] == shown["reason"] == text_of(recorded)

    with gangs.client() as client:
        events = list(client.watch_run(run["run_id"]))
    lost = [event.notice for event in events if event.notice.finding.code == "rank_failed"]
    assert len(lost) == 1 and lost[0].text == text_of(lost[0].finding)
    finding = lost[0].finding
    assert finding.severity == SEVERITY_WARNING
    assert "the run waits for a gang and continues: rank" in finding.what and "SIGKILL" in finding.what
    assert "trainer" in finding.where and "its log ends with" in finding.why
    assert "continues from its last checkpoint" in finding.next_step
