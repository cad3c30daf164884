"""Worker processes end when the service does, also when it is killed.

Invariant: shortly after the death of the service's main process, or of vLLM's engine process, neither the worker
nor the engine process is left; shared memory is then unlinked by Python's resource tracker.
"""

from __future__ import annotations

import os
import select
import signal
import threading

SERVICE_PID = "FLOTILLA_GENERATOR_PID"


def end_with_the_service() -> None:
    """Watch the service and the parent from a worker; does nothing in the service itself.

    A worker that is the only one lives inside the engine process, and the parent is the service.
    """
    service, parent = int(os.environ.get(SERVICE_PID, "0")), os.getppid()
    if service in (0, os.getpid()):
        return
    watcher = threading.Thread(target=_watch, args=(service, parent), name="parent-watch", daemon=True)
    watcher.start()


def _watch(service: int, parent: int) -> None:
    poller = select.poll()
    try:
        for pid in {service, parent}:
            poller.register(os.pidfd_open(pid), select.POLLIN)
        poller.poll()
    except ProcessLookupError:
        pass  # already dead: the end is the same
    if os.getppid() == parent != service:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
