"""Run the fork server: it imports torch and the rank's code once, then forks ranks for the front.

Invariants: it dies with the front, and every rank with it, whatever they are doing; it never touches a GPU and runs one
thread, so that a fork is a complete process; it reports how each rank ended, in the order in which they ended.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
REQUEST_BYTES = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork ranks until the front goes away."""
    parser = argparse.ArgumentParser(prog="flotilla-trainer-ranks")
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--front", type=int, required=True, help="process id of the front")
    options = parser.parse_args()
    _die_with(options.front)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ForkServer(socket.socket(fileno=options.descriptor)).serve()


class ForkServer:
    """Holds the ranks by process id, each with the socket that its end is reported on."""

    def __init__(self, front: socket.socket) -> None:
        self._front = front
        self._ranks: dict[int, socket.socket] = {}
        self._ended, wakeup = socket.socketpair()
        self._ended.setblocking(False)
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno())
        self._wakeup = wakeup

    def serve(self) -> None:
        """Fork and reap ranks until the front closes its socket."""
        gc.disable()  # Nothing of an import is garbage, and looking for it takes a sixth of the time.
        import flotilla_trainer.rank.main  # noqa: F401

        gc.freeze()  # The ranks keep sharing the memory of all objects that exist now.
        gc.enable()
        while True:
            ready, _, _ = select.select([self._front, self._ended], [], [])
            if self._ended in ready:
                self._ended.recv(REQUEST_BYTES)
                self._reap()
            if self._front in ready:
                request, descriptors, _, _ = socket.recv_fds(self._front, REQUEST_BYTES, 3)
                if not request:
                    os._exit(0)
                self._fork(json.loads(request), *descriptors)

    def _fork(self, request: dict[str, Any], line: int, log: int, reply: int) -> None:
        fork_server, report = os.getpid(), socket.socket(fileno=reply)
        pid = os.fork()
        if pid == 0:
            self._become_rank(fork_server, request, line, log, report)
        self._ranks[pid] = report
        os.close(line)
        os.close(log)

    def _become_rank(
        self, fork_server: int, request: dict[str, Any], line: int, log: int, report: socket.socket
    ) -> NoReturn:
        _die_with(fork_server)
        os.setsid()
        self._forget()
        for standard in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log, standard)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        LIBC.prctl(PR_SET_NAME, request["name"].encode())
        report.sendall(b"born %d\n" % os.getpid())
        report.close()
        from flotilla_trainer.rank.main import serve

        serve(line, Path(request["stacks"]))

    def _forget(self) -> None:
        """Close the sockets and handlers of the fork server, in the rank."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (self._front, self._ended, self._wakeup, *self._ranks.values()):
            ours.close()

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            report = self._ranks.pop(pid, None)
            if report is None:
                continue
            with report:
                try:
                    report.sendall(b"ended %d\n" % os.waitstatus_to_exitcode(status))
                except OSError:
                    pass  # The gang that started this rank is gone.


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
