"""`flotilla-reward`: one replica of the reward service."""

from __future__ import annotations

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
from flotilla_core.service import Host, Service, run_service


def build(host: Host) -> Service:
    """Return the service inside its host."""
    from flotilla_reward.service import RewardHostService

    return RewardHostService(host.stack.reward, host.files, host.stack.judges)


def main() -> None:
    run_service(SERVICE_KIND_REWARD, build)


if __name__ == "__main__":
    main()
