"""The models of a run: its policy, a critic where advantages come from values, and those that only score.

Invariants: a gang with another tokenizer than the coordinator's is refused before a session opens; a reward model has
its own. Policy and critic learn from a batch at the same time, each once, and a step ends when both are done; on the
same GPUs they learn in turns, because these have memory for the activations of one. One checkpoint holds both, and a
run continues with both from the same checkpoint or with neither. Readers see such a checkpoint whole or not at all,
because its parts are inside each other and sealed together before the one rename that publishes them. A part that fails
costs this checkpoint alone, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flotilla.common.v1.files_pb2 import FolderReference, SharedFolder
from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.data.same_tokenizer import require_same_tokenizer
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_coordinator.trainers.roles import (
    Critic,
    PolicyTrainer,
    RewardModelSession,
    ScoringSession,
    Teachers,
)
from flotilla_coordinator.trainers.session import COORDINATOR, Gang, GangSession, LearningSession
from flotilla_coordinator.trainers.spec import (
    FROZEN_ROLES,
    critic_needs_start,
    critic_of,
    critic_spec,
    frozen_roles_of,
    frozen_spec,
    policy_updates,
    session_spec,
)
from flotilla_core.checkpoint import CheckpointShelf, Manifest, on_disk
from flotilla_core.config import CriticConfig, PolicyConfig, RunConfig, StackConfig
from flotilla_core.config.model import is_url
from flotilla_core.errors import FlotillaError, Mismatch, Unavailable
from flotilla_core.gangs import gang_of, model_of, roles_on_shared_gpus
from flotilla_core.kinds import EPISODES
from flotilla_core.roles import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD_MODEL,
    TEACHER,
    kind_of_role,
    name_of_role,
    process_name,
)
from flotilla_core.tasks import all_settled, gather_or_cancel
from flotilla_core.transfer import Files, files_of_functions, shared_folder
from flotilla_data.tokenizer import Tokenizer

Judge = Callable[[Batch], Awaitable[None]]

Stages = AsyncGenerator[pb.SaveCheckpointResponse]


@dataclass(frozen=True)
class StepUpdates:
    """The updates of one step."""

    policy: pb.UpdateResult | None
    """The policy's update; None in steps in which only the critic learns."""
    critic: pb.UpdateResult | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the policy's metrics under their own names, and the critic's under `critic/`."""
        metrics = {} if self.policy is None else dict(self.policy.metrics)
        if self.critic is not None:
            metrics |= {f"critic/{name}": value for name, value in self.critic.metrics.items()}
        return metrics

    @property
    def skipped(self) -> dict[str, str]:
        """Return the reason for each update that was skipped, by its name."""
        updates = {"update": self.policy, "update of the critic": self.critic}
        return {name: update.skipped for name, update in updates.items() if update and update.skipped}

    @property
    def skipped_steps(self) -> list[str]:
        """Return the optimizer steps that were left out of updates that were made."""
        updates = {"the policy": self.policy, "the critic": self.critic}
        return [
            f"{step} ({name})" for name, update in updates.items() if update for step in update.skipped_steps
        ]


class Learners:
    """The sessions of one run that are trained, saved and lost together."""

    def __init__(
        self,
        policy: PolicyTrainer,
        critic: Critic | None = None,
        critic_steps: int = 0,
        *,
        frozen: Sequence[ScoringSession | RewardModelSession] = (),
        judges: Mapping[str, Judge] | None = None,
        in_turns: bool = False,
        on_shared_gpus: bool = False,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.judges = judges or {}
        """The models that score every token of a batch before it is trained, in this order."""
        self._frozen = frozen
        self._critic_steps = critic_steps
        self._in_turns = in_turns
        self.on_shared_gpus = on_shared_gpus
        """True where some of them have the GPUs of the trainer, on which generators may have to make room."""

    @property
    def reward_models(self) -> dict[str, RewardModelSession]:
        """Return the sessions of the models that give rewards, by their names."""
        return {
            name_of_role(session.gang.role): session
            for session in self._frozen
            if isinstance(session, RewardModelSession)
        }

    @property
    def sessions(self) -> list[GangSession]:
        """Return all sessions, the policy's first."""
        return [*self.learning, *self._frozen]

    @property
    def learning(self) -> list[LearningSession]:
        """Return the sessions whose weights change, the policy's first."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def reconfigure(self, config: RunConfig) -> None:
        """Use other learning rates from the next update on."""
        self.policy.reschedule(config.optimizer.learning_rate, policy_updates(config))
        critic = critic_of(config)
        if self.critic is not None and critic is not None:
            self.critic.reschedule(critic.optimizer.learning_rate, config.steps)

    @property
    def opened(self) -> bool:
        """Return whether every gang has a session of this run, as far as this coordinator has opened them."""
        return all(session.opened for session in self.sessions)

    async def open(self) -> None:
        """Load the starting weights and build the optimizers; after a failure each session says whether it is open."""
        await all_settled(session.open() for session in self.sessions)

    async def lost(self) -> list[GangSession]:
        """Return the sessions that are gone; one is enough for the run to return to a checkpoint."""
        gone = await gather_or_cancel(session.lost() for session in self.sessions)
        return [session for session, is_gone in zip(self.sessions, gone, strict=True) if is_gone]

    def policy_learns(self, step: int) -> bool:
        """Return whether a step trains the policy; the first steps may train the critic alone."""
        return self.critic is None or step >= self._critic_steps

    async def train(self, batch: Batch) -> StepUpdates:
        """Make one update of each model; in the critic's warm-up, of the critic alone."""
        if self.critic is None:
            return StepUpdates(await self.policy.train(batch))
        if not self.policy_learns(batch.step):
            return StepUpdates(None, await self.critic.train(batch))
        if self._in_turns:
            return StepUpdates(await self.policy.train(batch), await self.critic.train(batch))
        policy, critic = await gather_or_cancel([self.policy.train(batch), self.critic.train(batch)])
        return StepUpdates(policy, critic)

    def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        """Write one checkpoint with `state` inside; yield a message when it is in memory, and one when on disk."""
        if self.critic is None:
            return self.policy.save(folder, state)
        return save_jointly(folder, state, self.policy, {CRITIC: self.critic})

    async def load(
        self, folder: Path, *, fresh_optimizer: bool = False, fresh_objective: bool = False
    ) -> bytes:
        """Load a checkpoint into every learning session; return the state that it was saved with."""
        parts: list[tuple[LearningSession, Path]] = [(self.policy, folder)]
        if self.critic is not None:
            parts.append((self.critic, folder / CRITIC))
        loads = [
            session.load(part, fresh_optimizer=fresh_optimizer, fresh_objective=fresh_objective)
            for session, part in parts
        ]
        state, *_ = await all_settled(loads)
        return state


async def save_jointly(
    folder: Path, state: bytes, policy: LearningSession, beside: Mapping[str, LearningSession]
) -> Stages:
    """Save one checkpoint with the others inside the policy's, by role; its stages are those of a single save."""
    shelf, name = CheckpointShelf(folder.parent), folder.name
    aside = await asyncio.to_thread(on_disk, folder, shelf.begin, name)
    whole = aside / POLICY / name
    parts = {role: aside / role / name for role in beside}
    try:
        async with AsyncExitStack() as saves:
            stages = [policy.save(whole, state)]
            stages += [session.save(parts[role], b"") for role, session in beside.items()]
            for stage in stages:
                await saves.enter_async_context(aclosing(stage))
            snapshots = await gather_or_cancel(next_stage(stage) for stage in stages)
            yield max(snapshots, key=lambda one: one.snapshot.stall.ToNanoseconds())
            durables = await all_settled(next_stage(stage) for stage in stages)
        manifest = await asyncio.to_thread(on_disk, folder, _join, shelf, name, whole, parts)
    finally:
        await asyncio.to_thread(shelf.discard, name)
    slowest = max(durables, key=lambda one: one.durable.elapsed.ToNanoseconds())
    durable = pb.CheckpointDurable(path=str(folder), bytes=manifest.nbytes, elapsed=slowest.durable.elapsed)
    yield pb.SaveCheckpointResponse(durable=durable)


async def next_stage(stages: Stages) -> pb.SaveCheckpointResponse:
    """Return the next message of a save, which a gang may not end before its last."""
    async for stage in stages:
        return stage
    raise Unavailable("the trainer ended the save without a result")


def _join(shelf: CheckpointShelf, name: str, whole: Path, parts: Mapping[str, Path]) -> Manifest:
    for role, part in parts.items():
        part.rename(whole / role)
    manifest = Manifest.join(whole, parts)
    shelf.publish(name, whole)
    return manifest


class SessionFactory:
    """Opens the sessions that a run needs: waits for the gangs of its stack and checks them."""

    def __init__(
        self,
        run_id: str,
        *,
        stack: StackConfig,
        fleet: RunFleet,
        ledger: Ledger,
        lineage: int,
        files: Files,
        tell: Callable[[str, str], None],
    ) -> None:
        self._run_id = run_id
        self._stack = stack
        self._fleet = fleet
        self._ledger = ledger
        self._lineage = lineage
        self._files = files
        self._tell = tell
        """Called with the name of a service and what it does, while the run waits for it."""

    async def learners(self, config: RunConfig, tokenizer: Tokenizer, directory: Path) -> Learners:
        """Prepare the policy, the critic where the run has one, and the models that only score."""
        config = await self._with_copies(config)
        gang = await self._gang(POLICY, tokenizer, episodes=config.environment is not None)
        dumps, place = directory / "dumps", shared_folder(directory)
        spec = with_references(session_spec(config, dumps), self._files.offer, place)
        policy = PolicyTrainer(self._run_id, spec, gang, self._ledger.run_ids, self._lineage)
        frozen = [await self._frozen(role, config, tokenizer, place) for role in frozen_roles_of(config)]
        judges = _judges(config, frozen)
        shared = bool(roles_on_shared_gpus(self._stack))
        critic = critic_of(config)
        if critic is None:
            return Learners(policy, frozen=frozen, judges=judges, on_shared_gpus=shared)
        if critic_needs_start(config):
            temperature = config.rollout.sampling.temperature
            judges[REFERENCE] = partial(policy.score_by_start, temperature=temperature)
        session = await self._critic(config, critic, tokenizer, dumps / CRITIC, place)
        judges[CRITIC] = session.value
        return Learners(
            policy,
            session,
            critic.warmup_steps,
            frozen=frozen,
            judges=judges,
            in_turns=self._stack.critic.shares_gpus,
            on_shared_gpus=shared,
        )

    async def _with_copies(self, config: RunConfig) -> RunConfig:
        """Return the run with copies on this host in place of weights that lie in object storage."""
        if is_url(config.initial_weights):
            folder = await self._copy_of(str(config.initial_weights))
            config = config.model_copy(update={"initial_weights": folder})
        critic = critic_of(config)
        if critic is not None and is_url(critic.initial_weights):
            folder = await self._copy_of(str(critic.initial_weights))
            critic = critic.model_copy(update={"initial_weights": folder})
            algorithm = config.algorithm.model_copy(update={"critic": critic})
            config = config.model_copy(update={"algorithm": algorithm})
        return config

    async def _copy_of(self, url: str) -> Path:
        tell = partial(self._tell, COORDINATOR)
        try:
            return await self._files.fetch_url(url, run_id=self._run_id, tell=tell)
        finally:
            tell("")

    async def _critic(
        self,
        config: RunConfig,
        critic: CriticConfig,
        tokenizer: Tokenizer,
        dumps: Path,
        place: SharedFolder,
    ) -> Critic:
        gang = await self._gang(CRITIC, tokenizer)
        has_own_model = self._stack.critic.model is not None
        spec = critic_spec(config, critic, dumps, has_own_model=has_own_model)
        spec = with_references(spec, self._files.offer, place)
        return Critic(self._run_id, spec, gang, self._ledger.run_ids, self._lineage)

    async def _frozen(
        self, role: str, config: RunConfig, tokenizer: Tokenizer, place: SharedFolder
    ) -> ScoringSession | RewardModelSession:
        gang = await self._gang(role, tokenizer)
        start = config.initial_weights if role == REFERENCE and self._stack.reference.model is None else None
        spec = frozen_spec(config, FROZEN_ROLES[kind_of_role(role)], str(start or ""))
        spec = with_references(spec, self._files.offer, place)
        if kind_of_role(role) == REWARD_MODEL:
            return RewardModelSession(self._run_id, spec, gang, self._ledger.run_ids, self._lineage)
        temperature, top_k = config.rollout.sampling.temperature, _top_k(config, role)
        return ScoringSession(
            self._run_id, spec, gang, self._ledger.run_ids, self._lineage, temperature, top_k
        )

    async def _gang(self, role: str, tokenizer: Tokenizer, *, episodes: bool = False) -> Gang:
        section = gang_of(self._stack, role)
        replica = await self._fleet.gang(role, self._stack.ready_timeout_s)
        if episodes and not replica.registration.capacity.get(EPISODES):
            raise Mismatch(
                f"{replica.name} is of a release that does not read episodes",
                where="environment",
                why="it would train their tokens after other prompts than those that the policy saw",
                next_step=f"replace it by one of this release: flotilla upgrade {process_name(role)}",
            )
        if kind_of_role(role) != REWARD_MODEL:
            require_same_tokenizer(replica, tokenizer, model_of(self._stack, role))
        longest_s = self._stack.longest_command_s(section)
        return Gang(
            role,
            replica.stub,
            replica.instance_id,
            longest_s,
            replica.name,
            self._files,
            replica.channel,
            self._tell,
        )


def _top_k(config: RunConfig, role: str) -> int:
    """Return how many of its likeliest tokens a gang is asked for in each place."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    return teacher.top_k if teacher is not None and kind_of_role(role) == TEACHER else 0


def _judges(config: RunConfig, frozen: Sequence[GangSession]) -> dict[str, Judge]:
    """Return the reference as one judge, and all teachers together as another."""
    algorithm = config.algorithm
    of_batches = [session for session in frozen if isinstance(session, ScoringSession)]
    teachers = [session for session in of_batches if kind_of_role(session.gang.role) == TEACHER]
    judges: dict[str, Judge] = {
        session.gang.name: session.score for session in of_batches if session not in teachers
    }
    if isinstance(algorithm, PolicyConfig) and algorithm.asked_teachers is not None:
        judges[TEACHER] = Teachers(algorithm.asked_teachers, teachers).score
    return judges


def with_references(
    spec: session_pb2.SessionSpec, offer: Callable[[Path], FolderReference], run_directory: SharedFolder
) -> session_pb2.SessionSpec:
    """Return the specification with what a gang on another host needs: the files that it reads, and the run's key."""
    spec.run_directory.CopyFrom(run_directory)
    if spec.initial_weights:
        with suppress(FlotillaError):  # a gang that needs the folder says what is wrong with it
            spec.initial_folder.CopyFrom(offer(Path(spec.initial_weights)))
    for file in files_of_functions(spec.objective.section):
        with suppress(FlotillaError):
            spec.code.append(offer(file))
    return spec
