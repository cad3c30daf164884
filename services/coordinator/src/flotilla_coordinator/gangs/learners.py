"""The models of a run: its policy, a critic beside it where advantages come from values, and those that only judge.

Invariants: policy and critic learn from a batch side by side, each once, and a step is over when both are done; one
checkpoint holds both, and a run goes on with both from the same one or with neither.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.critic import Critic
from flotilla_coordinator.gangs.frozen_role import FrozenRole
from flotilla_coordinator.gangs.gang_session import GangSession
from flotilla_coordinator.gangs.joint_checkpoint import save_jointly
from flotilla_coordinator.gangs.learned import Learned
from flotilla_coordinator.gangs.learning_session import LearningSession
from flotilla_coordinator.gangs.policy import PolicyTrainer
from flotilla_coordinator.gangs.session_spec import critic_of, policy_updates
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core.config import RunConfig
from flotilla_core.roles import CRITIC
from flotilla_core.tasks import all_of, all_settled

Judge = Callable[[Batch], Awaitable[None]]


class Learners:
    """The sessions of one run that are trained, saved and lost together."""

    def __init__(
        self,
        policy: PolicyTrainer,
        critic: Critic | None = None,
        critic_steps: int = 0,
        *,
        frozen: Sequence[FrozenRole] = (),
        judges: Mapping[str, Judge] | None = None,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.judges = judges or {}
        """Who says something of every token of a batch before anybody learns from it, in this order."""
        self._frozen = frozen
        self._critic_steps = critic_steps

    @property
    def sessions(self) -> list[GangSession]:
        """The policy's first."""
        return [*self.learning, *self._frozen]

    @property
    def learning(self) -> list[LearningSession]:
        """Those whose weights change, the policy's first."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def reconfigure(self, config: RunConfig) -> None:
        """Learn by other rates from the next update on."""
        self.policy.reschedule(config.optimizer.learning_rate, policy_updates(config))
        critic = critic_of(config)
        if self.critic is not None and critic is not None:
            self.critic.reschedule(critic.optimizer.learning_rate, config.steps)

    @property
    def opened(self) -> bool:
        """Whether every gang has a session of this run, as far as is known here."""
        return all(session.opened for session in self.sessions)

    async def open(self) -> None:
        """Load the starting weights and build the optimizers; where one fails, who has no session is known of each."""
        await all_settled(session.open() for session in self.sessions)

    async def lost(self) -> list[GangSession]:
        """The sessions that are gone; one is enough for the run to go back to a checkpoint."""
        gone = await all_of(session.lost() for session in self.sessions)
        return [session for session, is_gone in zip(self.sessions, gone, strict=True) if is_gone]

    def policy_learns(self, step: int) -> bool:
        """Whether a step moves the policy: the first ones may be for the critic alone."""
        return self.critic is None or step >= self._critic_steps

    async def train(self, batch: Batch) -> Learned:
        """One update of each; of the critic alone in the first steps, where the run says so."""
        if self.critic is None:
            return Learned(await self.policy.train(batch))
        if not self.policy_learns(batch.step):
            return Learned(None, await self.critic.train(batch))
        policy, critic = await all_of([self.policy.train(batch), self.critic.train(batch)])
        return Learned(policy, critic)

    def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        """One checkpoint, with `state` inside: a message when all of it is in memory, another when it is on disk."""
        if self.critic is None:
            return self.policy.save(folder, state)
        return save_jointly(folder, state, self.policy, {CRITIC: self.critic})

    async def load(self, folder: Path) -> bytes:
        """Put everything back to a checkpoint; the state that it was saved with."""
        loads = [self.policy.load(folder)]
        if self.critic is not None:
            loads.append(self.critic.load(folder / CRITIC))
        state, *_ = await all_settled(loads)
        return state
