"""Which of the runs that an earlier coordinator left unfinished goes on by itself.

Invariants: a run that its user wanted to end, or to resume himself, does not; nor does one whose steps a client makes,
for nobody here knows what the client wants; nor one under which coordinators die again and again without a step.
"""

from __future__ import annotations

from pathlib import Path

from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.stored_run import INTERRUPTED
from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import InvalidConfig

MOST_IN_A_ROW = 2
AGAIN_AND_AGAIN = (
    "the run was taken over {times} times after its coordinator had died, without a step in between, and is not taken "
    "over again by itself. See `flotilla logs coordinator`, then continue it: flotilla run resume {run_id}"
)
REFUSED = (
    "the run did not go on after its coordinator had died: {error}. Continue it: flotilla run resume {run_id}"
)


def why_it_ends(record: RunRecord, takeovers: int) -> str:
    """Why a run that was taken over so often does not go on by itself; empty where it does."""
    if record.state is RunState.STOPPING or RunDirectory(Path(record.directory)).read_outcome() is not None:
        return INTERRUPTED
    # A run that is paused makes no step, however well its coordinators are.
    if takeovers >= MOST_IN_A_ROW and record.state is not RunState.PAUSED:
        return AGAIN_AND_AGAIN.replace("{times}", str(takeovers))
    try:
        config = load_text(RunConfig, record.config_yaml, source="run")
    except InvalidConfig as error:
        return REFUSED.replace("{error}", str(error).rstrip("."))
    if config.resume == "by_user" or config.loop == "client":
        return INTERRUPTED
    return ""
