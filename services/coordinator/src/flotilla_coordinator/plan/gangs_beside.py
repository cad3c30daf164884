"""The gangs of a stack beside its policy: where they may sit, and what they keep on the GPUs of the trainer's ranks.

Invariant: what the file says of a gang stays as it is. A gang on the GPUs of the trainer keeps its state there for the
whole run, or in host memory; what it computes with is there in its turn alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flotilla_coordinator.plan import size_limits
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import HostMemory, resting_bytes
from flotilla_core.config import GangConfig, StackConfig
from flotilla_core.gangs import gang_of, model_of, roles_on_shared_gpus, with_gang
from flotilla_core.gpu_shares import RANK_PROCESS
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import CRITIC, LEARNING, section_of
from flotilla_launch.gpus import Gpus


def may_share(stack: StackConfig, role: str) -> bool:
    """Return whether a gang may have the GPUs of the trainer's ranks or its own, as far as the file says."""
    gang, trainer = gang_of(stack, role), stack.trainer
    if not isinstance(gang, GangConfig) or gang.placement != "auto" or gang.replicas != 1:
        return False
    here = gang.attach is None and not gang.hosts and gang.backend != "gloo"
    with_trainer = trainer.replicas == 1 and trainer.attach is None and not trainer.hosts
    return here and with_trainer and trainer.backend != "gloo"


def seatings(stack: StackConfig, roles: Sequence[str], gpus: Gpus) -> Iterator[StackConfig]:
    """Return the stack with these gangs in each place that they may have, the best first.

    On GPUs of their own they idle most of the time; where the file counts ranks or generators, it may count on that.
    """
    shared, own = (seated(stack, roles, placement=place) for place in ("colocated", "separate"))
    counted = stack.trainer.sets("nproc") or stack.generator.sets("replicas") or stack.placement == "separate"
    counted = counted or any(gang_of(stack, role).sets("nproc") for role in roles)
    yield from (own, shared) if counted or len({*gpus.names}) < len(gpus.names) else (shared, own)
    # Models that only score lose less by weights that visit the GPU than a critic, whose optimizer is on the host then.
    resting = [role for role in roles if not gang_of(stack, role).sets("cpu_offload")]
    for some in ([role for role in resting if role not in LEARNING], resting):
        yield seated(shared, some, cpu_offload=True)


def seated(stack: StackConfig, roles: Sequence[str], **update: Any) -> StackConfig:
    """Return the stack with these values in the sections of some gangs."""
    for role in roles:
        stack = with_gang(stack, role, gang_of(stack, role).model_copy(update=update))
    return stack


def rest_on_host(stack: StackConfig, model: ModelFacts) -> bool:
    """Return whether the host has the memory for the weights of other gangs that rest there."""
    kept = [
        HostMemory.at_rest(role_model(model, stack, role), gang, learns=role in LEARNING) * gang.ranks_here
        for role, gang in ((role, gang_of(stack, role)) for role in roles_on_shared_gpus(stack))
    ]
    return sum(kept) <= size_limits.host_memory()


def role_model(model: ModelFacts, stack: StackConfig, role: str) -> ModelFacts:
    """Return the shape of the model that a gang of this role holds, in a stack whose own model is given."""
    folder = model_of(stack, role)
    own = model if folder == stack.model else ModelFacts.read(model_folder(folder))
    return own.with_value_head() if role == CRITIC else own


def role_bytes(model: ModelFacts, stack: StackConfig, role: str) -> int:
    """Return what a rank of a gang beside the policy keeps on its GPU while it has nothing to do."""
    return resting_bytes(role_model(model, stack, role), gang_of(stack, role), learns=role in LEARNING)


def bytes_beside(model: ModelFacts, stack: StackConfig) -> int:
    """Return what other gangs keep on a GPU of the trainer, with their processes."""
    return sum(role_bytes(model, stack, role) + RANK_PROCESS for role in roles_on_shared_gpus(stack))


def sections_beside(stack: StackConfig) -> str:
    """Return the sections of the gangs on the GPUs of the trainer."""
    return ", ".join(map(section_of, roles_on_shared_gpus(stack)))
