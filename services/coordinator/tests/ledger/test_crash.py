"""Everything that the ledger acknowledged is there after its coordinator was killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger

RUN = "chaos-20260314-0915-7f3a"
WRITE_UNTIL_KILLED = """
import asyncio, sys, time
import numpy as np
from pathlib import Path
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import GroupIssue, RunRecord, RunState

RUN = sys.argv[2]

async def main():
    ledger = Ledger.open(Path(sys.argv[1]))
    await ledger.save_run(RunRecord(RUN, "chaos", RunState.RUNNING, "{}", "", time.time()))
    async def write(worker):
        for number in range(10**9):
            group = f"{RUN}/{worker}/{number}"
            await ledger.group_issued(GroupIssue(RUN, group, (group + "/0",), 0, 0, "", np.zeros(1, np.int32)))
            print(group + "/0", flush=True)
    await asyncio.gather(*(write(worker) for worker in range(8)))

asyncio.run(main())
"""


def test_whatever_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path), RUN], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    acknowledged = {child.stdout.readline().strip() for _ in range(200)}
    child.kill()
    acknowledged |= {line.strip() for line in child.stdout if line.endswith("\n")}
    child.wait(timeout=10)
    kept = asyncio.run(_sample_ids(path))
    assert len(acknowledged) >= 200
    assert acknowledged <= kept
    assert check(path, RUN).passed


async def _sample_ids(path: Path) -> set[str]:
    ledger = Ledger.open(path)
    records = await ledger.samples(RUN, limit=10**6)
    ledger.close()
    return {record.sample_id for record in records}
