"""Whether functions of users load, found out in a process of its own, which ends when it takes too long.

A service that runs such functions has one of its own, `package.module:function`, that loads one by keyword arguments
and says what is wrong with it. The process calls it for each of a JSON list, in the jail in which they will run.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla_workers.jail.jail import Cell


def problems(problem: str, asked: str, limit_s: float, cell: Cell) -> tuple[str, ...] | str:
    """Return what `problem` says of each that is asked for, or one text that says why there is no answer."""
    with cell.start([sys.executable, "-m", __name__, problem]) as start:
        child = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=start.environment | {"PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=start.descriptors,
        )
    try:
        out, said = child.communicate(asked, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"their import took longer than {limit_s:.0f} s"
    finally:
        # Kill whatever the user's code started as well.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        cell.close()
    if out:
        return tuple(json.loads(out))
    if child.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        return "the process that imported them was killed"
    if said:  # By Python, before any of them was imported.
        return f"the process that imports them does not start: {said.strip().splitlines()[-1]:.300}"
    how = f"its import, or that of another one here, ends the process (code {child.returncode})"
    return (how,) * len(json.loads(asked))


def main() -> None:
    gc.set_threshold(50_000)  # Nothing of an import is garbage.
    # What user code prints must not come between, and is nobody's.
    results = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    started_as = os.getpid()
    problem = pkgutil.resolve_name(sys.argv[1])
    found = [problem(**one) for one in json.load(sys.stdin)]
    if os.getpid() != started_as:
        os._exit(0)  # A process that a file forked when it was imported answers nothing.
    results.write(json.dumps(found))
    results.close()
    # Threads that user code started keep no process.
    os._exit(0)


if __name__ == "__main__":
    main()
