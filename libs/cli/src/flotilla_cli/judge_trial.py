"""Scores samples through a reward replica of the fleet, which alone reaches the judges that the fleet holds.

Invariant: it is the call that runs make, by the same terms, so a figure that it gives is that of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_client import Client
from flotilla_client.discovery import find_coordinator
from flotilla_core import rpc
from flotilla_core.config import FleetJudgeConfig, RewardTermConfig, StackConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, Unavailable
from flotilla_core.roles import JUDGE, named_role

if TYPE_CHECKING:
    from flotilla_core.trust import Credential

_ANSWER_S = 10.0
_WAIT_S = 10.0
"""The longest wait for a reward replica that is READY in the registry."""


def asks_fleet(terms: tuple[RewardTermConfig, ...], stack: StackConfig) -> list[str]:
    """Return the judges of these terms that the fleet holds."""
    asked = dict.fromkeys(term.judge for term in terms)
    return [name for name in asked if isinstance(stack.judges.get(name), FleetJudgeConfig)]


async def scored_by_fleet(
    terms: tuple[RewardTermConfig, ...], items: list[pb.ScoreItem], steps: int | None, stack: StackConfig
) -> list[pb.ScoreOutcome]:
    """Return one outcome for each item, in their order."""
    from flotilla_coordinator.rollouts.judges import FleetJudges
    from flotilla_coordinator.rollouts.scoring import RewardServiceScorer

    judges = asks_fleet(terms, stack)
    services, credential = await _services(judges, stack)
    generators = {name: partial(_generators, name, services) for name in judges}
    pool: rpc.ReplicaPool[Any] = rpc.ReplicaPool(
        reg.SERVICE_KIND_REWARD, RewardServiceStub, partial(rpc.connect, credential=credential)
    )
    try:
        await pool.update({**services})
        scorer = RewardServiceScorer(
            "", terms, pool, _WAIT_S, total_steps=steps, judges=FleetJudges(generators)
        )
        found = await scorer.outcomes(items)
    finally:
        await pool.close()
    return [found[item.sample_id] for item in items]


async def _services(
    judges: list[str], stack: StackConfig
) -> tuple[Mapping[str, reg.Registration], Credential]:
    """Return the services of the fleet that runs."""
    try:
        found = find_coordinator(stack.name, stack.state_dir, bind=stack.bind)
        async with Client(found.address, credential=found.credential) as client:
            services = await client.list_services()
    except FlotillaError as error:
        raise FailedPrecondition(
            f"the fleet holds judge {', '.join(judges)}, and has to run to ask it",
            where=f"stack {stack.name!r}",
            why=str(error),
            next_step="start it with flotilla up",
        ) from error
    return {one.registration.instance_id: one.registration for one in services}, found.credential


async def _generators(judge: str, services: Mapping[str, reg.Registration]) -> list[reg.Registration]:
    role, ready = named_role(JUDGE, judge), reg.INSTANCE_STATE_READY
    held = [one for one in services.values() if one.role == role and one.state == ready]
    if not held:
        raise Unavailable(f"no generator of judge {judge} is ready", next_step="See flotilla ps.")
    return held
