"""Outlives the supervisor by a moment, to sweep when it was killed.

The kernel ends the supervisor's children with it, but not what they started (vLLM's engine, the trainer's
ranks). The guardian holds the read end of a pipe whose only writer is the supervisor: when that ends, for
whatever reason, it sweeps. After an orderly stop there is nothing left to do. Run: python -m
flotilla_launch.guardian DIR
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from flotilla_launch.claim import claim
from flotilla_launch.paths import StackPaths
from flotilla_launch.sweep import sweep

_CLAIM_LIMIT_S = 5.0


def start_guardian(paths: StackPaths) -> subprocess.Popen[bytes]:
    """Keep the returned process: its stdin is the pipe."""
    with paths.log_file("launcher").open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "flotilla_launch.guardian", str(paths.directory)],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    paths = StackPaths(Path(sys.argv[1]))
    # The dying supervisor may hold the claim for another moment. A new one keeps it: then it has swept itself.
    with claim(paths.claim_file, timeout_s=_CLAIM_LIMIT_S) as claimed:
        if claimed and paths.processes_file.exists():
            ended = ", ".join(sweep(paths)) or "nothing was left"
            sys.stdout.write(f"the supervisor was killed; the guardian swept: {ended}\n")


if __name__ == "__main__":
    main()
