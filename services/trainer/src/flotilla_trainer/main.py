"""Run the trainer service as the process `flotilla-trainer`."""

from __future__ import annotations

import sys

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_TRAINER
from flotilla_core.service import Host, Service, run_service


def main() -> None:
    """Serve until the process is asked to stop."""
    sys.exit(run_service(SERVICE_KIND_TRAINER, _build))


def _build(host: Host) -> Service:
    from flotilla_trainer.service import TrainerService

    return TrainerService(host)


if __name__ == "__main__":
    main()
