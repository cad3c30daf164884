"""`flotilla-coordinator`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla_coordinator.service import Coordinator
    from flotilla_core.service import Host


def main() -> None:
    """Run one coordinator until SIGTERM."""
    from flotilla.common.v1.registration_pb2 import SERVICE_KIND_COORDINATOR
    from flotilla_coordinator.memory import share_allocations
    from flotilla_core.service import run_service

    share_allocations()

    def build(host: Host) -> Coordinator:
        from flotilla_coordinator.service import Coordinator

        return Coordinator(host)

    sys.exit(run_service(SERVICE_KIND_COORDINATOR, build))


if __name__ == "__main__":
    main()
