"""Run the trainer service as the process `flotilla-trainer`, and its agents on further hosts as `flotilla-ranks`."""

from __future__ import annotations

import sys

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_RANKS, SERVICE_KIND_TRAINER
from flotilla_core.service import Host, Service, run_service


def main() -> None:
    """Serve until the process is asked to stop."""
    sys.exit(run_service(SERVICE_KIND_TRAINER, _build))


def ranks() -> None:
    """Run ranks of another host's trainer until the process is asked to stop."""
    sys.exit(run_service(SERVICE_KIND_RANKS, _build_agent))


def _build(host: Host) -> Service:
    from flotilla_trainer.service import TrainerService

    return TrainerService(host)


def _build_agent(host: Host) -> Service:
    from flotilla_trainer.agent import RankAgent

    return RankAgent(host)


if __name__ == "__main__":
    main()
