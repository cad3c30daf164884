"""Entry point of a rank process; heavy imports wait until the front knows that the process lives.

Invariants: the process dies with the front, whatever it does at that moment; SIGUSR1 writes the stacks of all its
threads to a file that the front reads; an error that nobody expected ends the process at once with a traceback in its
log, because peers would wait for it in a collective.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType

from flotilla_trainer.frames import Frame
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.setup import RankSetup

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the front until it goes away."""
    parser = argparse.ArgumentParser(prog="flotilla-trainer-rank")
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--front", type=int, required=True, help="process id of the front")
    parser.add_argument("--stacks", type=Path, required=True, help="file for stack dumps")
    options = parser.parse_args()

    _die_with(options.front)
    stacks = options.stacks.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.enable()
    # Stopping the gang is the front's business, also when a terminal signals the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = end_at_once

    link = FrontLink(options.descriptor)
    command = link.next_command()
    setup = RankSetup.from_fields(command.fields)
    link.progress("importing torch and transformers")

    from flotilla_core import telemetry
    from flotilla_trainer.rank.worker import RankWorker

    telemetry.start("trainer-rank", f"{setup.instance_id}-rank-{setup.rank}", setup.otlp)
    link.urgent("leave", _leave)
    worker = RankWorker(setup, link)
    link.answer(command, {})
    worker.serve()


def _die_with(front: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != front:
        os._exit(0)


def _leave(frame: Frame) -> None:
    """End now, whatever the main thread waits for; spans that are done still go out."""
    from flotilla_core import telemetry

    telemetry.stop()
    os._exit(0)


def end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As `sys.excepthook`: the traceback into the log, and out, whatever other threads do."""
    # Not sys.stderr: torch.distributed puts a buffer there while it calls this, and would print it too late.
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    if sys.__stderr__ is not None:
        sys.__stderr__.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
