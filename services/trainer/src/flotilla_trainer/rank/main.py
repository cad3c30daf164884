"""Run a rank process, from its fork on.

Invariants: SIGUSR1 writes the stacks of all its threads to a file that the front reads; an unexpected error ends the
process at once with a traceback in its log, because other ranks would wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import transformers.modeling_layers  # noqa: F401 - every model's code does, and ranks share what comes before a fork

from flotilla_core import telemetry
from flotilla_core.errors import FlotillaError
from flotilla_core.logs import tolerate_lost_lines
from flotilla_core.trust import Credential
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.meeting import Meeting
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.frames import Frame
from flotilla_trainer.wire.settings import OPEN_STORE, RankSetup


def serve(descriptor: int, stacks_path: Path) -> NoReturn:
    """Serve the front until its connection ends, which ends the process."""
    tolerate_lost_lines()
    stacks = stacks_path.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.enable()
    # Only the front stops the gang, also when a terminal signals the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = end_at_once
    # The variable was read before the fork, perhaps with another value.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    link = FrontLink(descriptor)
    meeting = Meeting()
    command = _setup_command(link, meeting)
    setup = RankSetup(**command.fields)
    credential = Credential(Path(setup.credential_file)) if setup.credential_file else None
    telemetry.start(
        "trainer-rank", f"{setup.instance_id}-rank-{setup.rank}", setup.otlp, credential=credential
    )
    link.urgent("leave", _leave)
    worker = RankWorker(setup, link, meeting)
    link.answer(command, {})
    worker.serve()


def _setup_command(link: FrontLink, meeting: Meeting) -> Frame:
    """Open the store of the gang where the front asks this rank to; return the command that says what it is."""
    while (command := link.next_command()).kind == OPEN_STORE:
        try:
            link.answer(command, {"rendezvous": meeting.open(command.fields["host"])})
        except FlotillaError as error:
            link.refuse(command, error)
    return command


def _leave(frame: Frame) -> None:
    """End the process now, whatever the main thread waits for; finished spans are still sent."""
    telemetry.stop()
    os._exit(0)


def end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback to the log and end the process, whatever other threads do; this is `sys.excepthook`."""
    # Not sys.stderr: torch.distributed puts a buffer there while it calls this, and would print it too late.
    with contextlib.suppress(OSError):  # a full disk takes no log
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        if sys.__stderr__ is not None:
            sys.__stderr__.flush()
    os._exit(1)
