"""Starts the coordinator: `flotilla-coordinator`.

Messages arrive on threads of gRPC, are used by the event loop and freed by the thread that writes the ledger. With one
memory arena for each thread, glibc's default, memory that one thread frees is of no use to the others, and the process
holds its peak several times. So all threads share a few arenas.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla_coordinator.service import Coordinator
    from flotilla_core.service import Host

M_ARENA_MAX = -8
ARENAS = 2


def share_allocations() -> None:
    """Limit the arenas of the process; call it before there are threads."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:  # only glibc has it; other allocators share more
        limit(M_ARENA_MAX, ARENAS)


def main() -> None:
    """Run one coordinator until SIGTERM."""
    from flotilla.common.v1.registration_pb2 import SERVICE_KIND_COORDINATOR
    from flotilla_core.service import run_service

    share_allocations()

    def build(host: Host) -> Coordinator:
        from flotilla_coordinator.service import Coordinator

        return Coordinator(host)

    sys.exit(run_service(SERVICE_KIND_COORDINATOR, build))


if __name__ == "__main__":
    main()
