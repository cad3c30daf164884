"""`flotilla-reward`: one replica of the reward service."""

from __future__ import annotations

from pathlib import Path

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
from flotilla_core.gangs import model_of
from flotilla_core.roles import JUDGE, named_role
from flotilla_core.service import Host, Service, run_service
from flotilla_core.service.model import model_here


def build(host: Host) -> Service:
    """Return the service inside its host."""
    from flotilla_reward.judges.judge import Judges
    from flotilla_reward.service import RewardHostService

    async def folder_of(judge: str) -> Path:
        role = named_role(JUDGE, judge)
        return await model_here(model_of(host.stack, role), role, host.files)

    judges = Judges(host.stack.judges, host.connect, folder_of)
    return RewardHostService(host.stack.reward, host.files, judges)


def main() -> None:
    run_service(SERVICE_KIND_REWARD, build)


if __name__ == "__main__":
    main()
