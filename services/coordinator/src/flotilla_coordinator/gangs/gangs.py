"""The gangs that a run needs: waited for, looked at, and asked for a session each.

Invariant: a gang that would read the tokens in another way than the coordinator is refused before a session opens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flotilla_coordinator.data.tokenizer import Tokenizer, require_same_tokenizer
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_coordinator.gangs.critic import Critic
from flotilla_coordinator.gangs.frozen_role import FrozenRole
from flotilla_coordinator.gangs.gang_session import Gang
from flotilla_coordinator.gangs.learners import Judge, Learners
from flotilla_coordinator.gangs.policy import PolicyTrainer
from flotilla_coordinator.gangs.session_spec import (
    FROZEN_ROLES,
    critic_needs_start,
    critic_of,
    critic_spec,
    frozen_roles_of,
    frozen_spec,
    session_spec,
)
from flotilla_coordinator.gangs.teachers import Teachers
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_core.config import CriticConfig, PolicyConfig, RunConfig, StackConfig
from flotilla_core.gangs import gang_of, model_of
from flotilla_core.roles import CRITIC, POLICY, REFERENCE, TEACHER, kind_of_role


class Gangs:
    """Those of one stack, for one run."""

    def __init__(
        self, run_id: str, stack: StackConfig, fleet: RunFleet, ledger: Ledger, lineage: int
    ) -> None:
        self._run_id = run_id
        self._stack = stack
        self._fleet = fleet
        self._ledger = ledger
        self._lineage = lineage

    async def learners(self, config: RunConfig, tokenizer: Tokenizer, dump_dir: Path) -> Learners:
        """The policy, and the critic where the run has one."""
        gang = await self._gang(POLICY, tokenizer)
        spec = session_spec(config, dump_dir)
        policy = PolicyTrainer(self._run_id, spec, gang, self._ledger.run_ids, self._lineage)
        frozen = [await self._frozen(role, config, tokenizer) for role in frozen_roles_of(config)]
        judges = _judges(config, frozen)
        critic = critic_of(config)
        if critic is None:
            return Learners(policy, frozen=frozen, judges=judges)
        if critic_needs_start(config):
            temperature = config.rollout.sampling.temperature
            judges[REFERENCE] = partial(policy.score_by_start, temperature=temperature)
        session = await self._critic(config, critic, tokenizer, dump_dir / CRITIC)
        judges[CRITIC] = session.value
        return Learners(policy, session, critic.warmup_steps, frozen=frozen, judges=judges)

    async def _critic(
        self, config: RunConfig, critic: CriticConfig, tokenizer: Tokenizer, dump_dir: Path
    ) -> Critic:
        gang = await self._gang(CRITIC, tokenizer)
        has_own_model = self._stack.critic.model is not None
        spec = critic_spec(config, critic, dump_dir, has_own_model=has_own_model)
        return Critic(self._run_id, spec, gang, self._ledger.run_ids, self._lineage)

    async def _frozen(self, role: str, config: RunConfig, tokenizer: Tokenizer) -> FrozenRole:
        gang = await self._gang(role, tokenizer)
        start = config.initial_weights if role == REFERENCE and self._stack.reference.model is None else None
        spec = frozen_spec(config, FROZEN_ROLES[kind_of_role(role)], str(start or ""))
        temperature, top_k = config.rollout.sampling.temperature, _top_k(config, role)
        return FrozenRole(self._run_id, spec, gang, self._ledger.run_ids, self._lineage, temperature, top_k)

    async def _gang(self, role: str, tokenizer: Tokenizer) -> Gang:
        section = gang_of(self._stack, role)
        replica = await self._fleet.gang(role, self._stack.ready_timeout_s)
        require_same_tokenizer(replica, tokenizer, model_of(self._stack, role))
        longest_s = self._stack.longest_command_s(section)
        return Gang(role, replica.stub, replica.instance_id, longest_s, replica.name)


def _top_k(config: RunConfig, role: str) -> int:
    """Tokens that a gang is asked for in each place beside the sampled one."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    return teacher.top_k if teacher is not None and kind_of_role(role) == TEACHER else 0


def _judges(config: RunConfig, frozen: list[FrozenRole]) -> dict[str, Judge]:
    """The reference by itself, and all teachers as one."""
    algorithm = config.algorithm
    teachers = [session for session in frozen if kind_of_role(session.gang.role) == TEACHER]
    judges: dict[str, Judge] = {
        session.gang.name: session.score for session in frozen if session not in teachers
    }
    if isinstance(algorithm, PolicyConfig) and algorithm.asked_teachers is not None:
        judges[TEACHER] = Teachers(algorithm.asked_teachers, teachers).score
    return judges
