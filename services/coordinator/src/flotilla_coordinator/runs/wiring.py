"""Builds every part of a run's loop from the configuration and the fleet.

Invariants: every error in the configuration or the data is found here, before the first sample is drawn; nothing in
here runs the loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import partial

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING
from flotilla.common.v1.registration_pb2 import Registration
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.training_sets import HeldOut, copies_folder, read_held_out, training_data
from flotilla_coordinator.evaluation.evaluate import Evaluator, PairEvaluator, held_out_prompts
from flotilla_coordinator.evaluation.pinned_evaluation import PinnedEvaluation
from flotilla_coordinator.fleet.autoscale import Autoscaler, IdleShares
from flotilla_coordinator.fleet.launcher import LauncherLink
from flotilla_coordinator.fleet.run_fleet import RunFleet, SleepingGenerators
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.plan import batching_of_run, sleeps_in
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import BatchSource, RolloutSample
from flotilla_coordinator.rollouts.environments import Environments
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import Generation, Sampler
from flotilla_coordinator.rollouts.group import GroupRollout
from flotilla_coordinator.rollouts.judges import (
    FleetJudges,
    JudgeTally,
    examples_of,
    measured,
)
from flotilla_coordinator.rollouts.played_turns import TurnLog
from flotilla_coordinator.rollouts.reward_models import RewardModel, RewardModelScorer, TermsInOrder
from flotilla_coordinator.rollouts.scoring import RewardServiceScorer, Scorer
from flotilla_coordinator.rollouts.source import RecordedSource, RolloutSource, SupervisedSource
from flotilla_coordinator.runs.checkpoints import RunCheckpoints
from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.client.sampling import ClientSampling, ClientSource
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.trainers.learners import SessionFactory
from flotilla_coordinator.trainers.roles import PolicyTrainer, RewardModelSession
from flotilla_coordinator.weights.canary import Canary, LiveCheck
from flotilla_coordinator.weights.members import Candidates, GeneratorReplica
from flotilla_coordinator.weights.sync import WeightSync
from flotilla_core.agreement import Rounding, agreement_limits
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.config import JudgeConfig, PolicyConfig, RewardMode, RewardTermConfig, dump_yaml
from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_core.findings import info, warning
from flotilla_core.gangs import model_of
from flotilla_core.model_folder import model_folder
from flotilla_core.service import Host
from flotilla_data.samples import ROLLOUTS
from flotilla_data.tokenizer import Tokenizer

NOTICE_EVERY_S = 10.0


class RunWiring:
    """Builds the context of one run."""

    def __init__(
        self, host: Host, fleet: RunFleet, ledger: Ledger, run_id: str, control: RunControl, status: RunStatus
    ) -> None:
        self._host = host
        self._fleet = fleet
        fleet.on_wait = self._warn
        self._ledger = ledger
        self._run_id = run_id
        self._control = control
        self._config = control.config
        self._status = status
        self._wait_limit_s = host.stack.ready_timeout_s
        self._pinned: PinnedEvaluation | None = None
        self._sleeping: SleepingGenerators | None = None
        self._reward_models: dict[str, RewardModel] = {}
        self._metrics: dict[str, float] = {}
        self._canary_figures: dict[str, float] = {}
        self._judges = JudgeTally()
        self._told: dict[str, float] = {}
        """When the loss of a replica was last told of, by its error."""

    async def build(
        self, directory: RunDirectory, lineage: int, fence: int
    ) -> tuple[RunContext, ClientLoop | None]:
        """Wait for the services of the run, then build its parts, and the loop of a client that makes the steps."""
        config = self._config
        tokenizer = await asyncio.to_thread(lambda: Tokenizer.load(model_folder(self._host.stack.model)))
        copies = copies_folder(self._host.stack)
        prompts = await asyncio.to_thread(
            PromptSource, config.data, tokenizer, config.seed, training_data(config, copies)
        )
        held_out = await asyncio.to_thread(read_held_out, config, tokenizer, copies)
        await self._measure_judges(directory)
        sessions = SessionFactory(
            self._run_id,
            stack=self._host.stack,
            fleet=self._fleet,
            ledger=self._ledger,
            lineage=lineage,
            files=self._host.files,
            tell=self._status.progress,
        )
        batching = await asyncio.to_thread(batching_of_run, config, self._host.stack, prompts.file)
        settled = config.model_copy(update={"batching": batching})
        learners = await sessions.learners(settled, tokenizer, directory.path)
        policy = learners.policy
        sync = self._sync(policy, prompts, tokenizer, fence)
        generation = self._generation(sync, tokenizer)
        self._reward_models = await asyncio.to_thread(self._reward_models_of, learners.reward_models)
        scorer = self._scorer(config.rewards, config.reward_mode)
        sampler = self._sampler(generation, tokenizer, sync)
        evaluator = self._evaluator(held_out, policy, sampler, scorer)
        if isinstance(evaluator, Evaluator) and config.evaluation is not None and config.evaluation.pinned:
            self._pinned = PinnedEvaluation(evaluator, self._fleet.generators.replicas, sync.serving.serves)
            self._fleet.users.append(self._pinned)
        context = RunContext(
            run_id=self._run_id,
            config=config,
            stack=self._host.stack,
            control=self._control,
            learners=learners,
            source=self._source(prompts, tokenizer, sampler, scorer, sync),
            sync=sync,
            evaluator=evaluator,
            pinned=self._pinned,
            sleeping_generators=self._sleeping,
            checkpoints=RunCheckpoints(
                self._run_id,
                config.checkpoint,
                learners,
                ledger=self._ledger,
                shelf=CheckpointShelf(directory.checkpoints_path),
                warn=self._warn,
                evaluated=directory.evaluated,
                awaited=lambda: None if self._pinned is None else self._pinned.awaited_step,
                configuration=lambda: dump_yaml(self._control.config),
            ),
            ledger=self._ledger,
            directory=directory,
            status=self._status,
            activities=self._host.activities,
            idle=IdleShares(self._fleet.generators.replicas),
            validator=generation.validator,
            episodes=sampler.figures if isinstance(sampler, Episodes) else None,
            reward_models=self._reward_models,
            judges=self._judges,
            rollouts=self._record(directory, tokenizer),
            metrics=self._metrics,
            canary_figures=self._canary_figures,
            autoscaler=self._autoscaler(),
        )
        if config.loop != "client":
            return context, None
        sampling = ClientSampling(self._run_id, config.rollout, lineage, tokenizer, generation, self._ledger)

        def trainer_lost(error: FlotillaError) -> None:
            self._fleet.trainers.eject(policy.gang.instance_id, str(error), replaceable=False)

        return context, ClientLoop(context, prompts, sampling, scorer, trainer_lost)

    def _sync(
        self, policy: PolicyTrainer, prompts: PromptSource, tokenizer: Tokenizer, fence: int
    ) -> WeightSync:
        weights = self._config.weights
        algorithm, stack = self._config.algorithm, self._host.stack

        most: Rounding | None = None

        def measured(rounding: Rounding | None) -> None:
            nonlocal most
            # The canary's few tokens take back nothing that a batch has shown.
            most = max(filter(None, (most, rounding)), default=None)
            if isinstance(algorithm, PolicyConfig):
                policy.agreement = agreement_limits(stack, algorithm.correction, most)

        measured(None)
        if isinstance(algorithm, PolicyConfig) and algorithm.correction.fail_at == "auto":
            policy.temperature = self._config.rollout.sampling.temperature
            policy.measured = measured if stack.trainer.dtype != "float32" else None
        backend = weights.backend
        if backend == "auto":
            ends = [end.registration for end in self._fleet.trainers.replicas()]
            ends += [end.registration for end in self._fleet.generators.everyone()]
            backend = "nccl" if all(end.capacity.get("gpus", 0) for end in ends) else "gloo"
        canary = Canary(
            self._run_id,
            weights.canary,
            stack,
            policy,
            [prompt.token_ids for prompt in prompts.file.first(weights.canary.prompts)],
            timeout_s=self._config.rollout.sample_timeout_s,
        )
        candidates = Candidates(
            self._fleet.generators,
            tokenizer=tokenizer,
            model=self._host.stack.model,
            wait_limit_s=self._wait_limit_s,
            notice=self._status.notice,
            spared=lambda replicas: replicas if self._pinned is None else self._pinned.spared(replicas),
        )
        check = LiveCheck(canary, self._canary_figures, measured, self._warn)
        sync = WeightSync(
            self._run_id,
            weights,
            backend=backend,
            policy=policy,
            candidates=candidates.fitting,
            ready=self._fleet.generators.replicas,
            evict=candidates.evict,
            record=lambda report: report.record_in(self._metrics),
            verify=check.verify,
            fence=fence,
            longest_sample_s=self._config.rollout.longest_sample_s,
            max_staleness=self._config.rollout.max_staleness,
        )
        self._fleet.users.append(sync)
        self._fleet.weight_mover = sync
        if sleeps_in(self._config, stack):

            def let_go(replica: GeneratorReplica, error: FlotillaError) -> None:
                sync.let_go(replica.instance_id)
                # Not a refusal of weights, of which three are one too many: it wakes when the memory is there again.
                candidates.evict(replica, Unavailable(f"{replica.name} did not wake", why=str(error)))

            self._sleeping = SleepingGenerators(
                self._run_id, self._fleet.generators.replicas, let_go, self._warn
            )
        return sync

    def _autoscaler(self) -> Autoscaler | None:
        config = self._host.stack.autoscale
        if config is None or not self._config.draws_samples:
            return None
        wanted = self._config.rollout.generators
        if wanted is not None:  # No run would get more.
            most = max(config.min_generators, min(config.max_generators, wanted))
            config = config.model_copy(update={"max_generators": most})
        launcher = LauncherLink(self._host.state_dir, self._host.stack.ready_timeout_s)
        least, most = config.min_generators, config.max_generators

        async def change(by: int) -> None:
            await launcher.change_generators(by, least=least, most=most)

        return Autoscaler(
            config,
            advise=self._status.advise,
            notice=self._status.notice,
            generators=lambda: len(self._fleet.generators.replicas()),
            change=change,
            may_act=lambda: self._fleet.is_alone,
        )

    def _tell_lost(self, sample_ids: tuple[str, ...], error: FlotillaError) -> None:
        # Hundreds of groups lose the same replica at once; samples/retried counts them all.
        if self._is_news(str(error)):
            self._status.notice(error.finding("samples are issued again", SEVERITY_WARNING))

    def _tell_went_on(self) -> None:
        text = "episodes went on after the turns that they had; episodes/resumed counts them"
        if self._is_news(text):
            self._status.notice(info(text))

    def _is_news(self, text: str) -> bool:
        """Return whether nobody was told of this lately."""
        now = time.monotonic()
        if now - self._told.get(text, -NOTICE_EVERY_S) < NOTICE_EVERY_S:
            return False
        self._told[text] = now
        return True

    def _sampler(self, generation: Generation, tokenizer: Tokenizer, sync: WeightSync) -> Sampler:
        """Return what makes samples: single responses, or episodes where the run has an environment."""
        config = self._config.environment
        if config is None:
            return generation
        pool, offer = self._fleet.environments, self._host.files.offer
        environments = Environments.of(self._run_id, config, pool, self._wait_limit_s, offer)
        return Episodes(
            self._config.seed,
            config,
            tokenizer,
            turns=generation,
            environments=environments,
            lost=self._tell_lost,
            log=TurnLog(self._ledger, sync.is_verified, _void_by(sync)),
            went_on=self._tell_went_on,
        )

    def _generation(self, sync: WeightSync, tokenizer: Tokenizer) -> Generation:
        return Generation(
            self._run_id,
            self._config.seed,
            tokenizer,
            pool=self._fleet.generators,
            serves=sync.serving.serves,
            wait_limit_s=self._wait_limit_s,
            lost=self._tell_lost,
        )

    def _warn(self, text: str) -> None:
        self._status.notice(warning(text))

    def _source(
        self,
        prompts: PromptSource,
        tokenizer: Tokenizer,
        sampler: Sampler,
        scorer: Scorer,
        sync: WeightSync,
    ) -> BatchSource:
        config = self._config
        if not isinstance(config.algorithm, PolicyConfig):
            return SupervisedSource(self._run_id, prompts, config.rollout.prompts_per_step)
        if config.data.recorded:
            return RecordedSource(self._run_id, prompts, config.rollout.prompts_per_step)
        if config.loop == "client":
            return ClientSource(prompts)
        groups = GroupRollout(
            self._run_id,
            config.rollout,
            sampler=sampler,
            scorer=scorer,
            ledger=self._ledger,
            advantage=config.algorithm.advantage,
            wait_until_verified=sync.wait_until_verified,
            is_void=_void_by(sync),
        )
        return RolloutSource(self._run_id, config.rollout, config.steps, prompts, groups, self._ledger)

    def _record(self, directory: RunDirectory, tokenizer: Tokenizer) -> RolloutRecord | None:
        rollout = self._config.rollout
        if not rollout.record:
            return None
        place, temperature = directory.path / ROLLOUTS, rollout.sampling.temperature
        return RolloutRecord(place, self._run_id, temperature, tokenizer.digest)

    def _reward_models_of(self, sessions: Mapping[str, RewardModelSession]) -> dict[str, RewardModel]:
        """Load the tokenizer of each reward model."""
        folders = {name: model_of(self._host.stack, one.gang.role) for name, one in sessions.items()}
        return {
            name: RewardModel(Tokenizer.load(model_folder(folders[name])), session, str(folders[name]))
            for name, session in sessions.items()
        }

    async def _measure_judges(self, directory: RunDirectory) -> None:
        """Ask the judges of their labelled examples, once for the run; raise where one agrees too little."""
        for term in self._config.judged_terms:
            examples = await asyncio.to_thread(examples_of, term)
            held = await self._fleet_judges().weights(term.judge) or self._endpoint(term.judge)
            ask = self._service_scorer((term,)).outcomes
            agreement, kept = await measured(term, examples, held, directory, ask)
            found = "agreed, when this run asked it," if kept else "agrees"
            text = (
                f"the judge of reward {agreement.term} {found} by {agreement.figure:.3f} ({agreement.shown})"
            )
            self._status.notice(info(text))

    def _endpoint(self, judge: str) -> list[str]:
        """Return which judge an endpoint has, as far as the stack knows: attached replicas have stacks of their own."""
        stack = self._host.stack
        found = stack.judges.get(judge)
        if not isinstance(found, JudgeConfig) or stack.reward.attach:
            return []
        return [found.url, found.model, json.dumps(found.request, sort_keys=True)]

    def _service_scorer(self, rewards: tuple[RewardTermConfig, ...]) -> RewardServiceScorer:
        offer, pool, steps = self._host.files.offer, self._fleet.rewards, self._config.steps
        return RewardServiceScorer(
            self._run_id, rewards, pool, self._wait_limit_s, offer, steps, self._fleet_judges()
        )

    def _fleet_judges(self) -> FleetJudges:
        async def generators(judge: str) -> list[Registration]:
            held = await self._fleet.judge(judge, self._wait_limit_s)
            return [one.registration for one in held]

        return FleetJudges(
            {judge: partial(generators, judge) for judge in self._fleet.judges}, self._fleet.doubt_judge
        )

    def _scorer(self, rewards: tuple[RewardTermConfig, ...], mode: RewardMode) -> Scorer:
        of_models = tuple(term for term in rewards if term.model is not None)
        of_service = tuple(term for term in rewards if term.model is None)
        service = self._service_scorer(of_service)
        models = RewardModelScorer(self._run_id, of_models, self._reward_models)
        if of_models and of_service:
            return Scorer(TermsInOrder(rewards, service, models), mode, self._judges)
        return Scorer(models if of_models else service, mode, self._judges)

    def _evaluator(
        self,
        held_out: list[tuple[HeldOut, PromptFile]],
        policy: PolicyTrainer,
        sampler: Sampler,
        scorer: Scorer,
    ) -> Evaluator | PairEvaluator | None:
        if not held_out:
            return None
        if self._config.evaluates_pairs:
            pairs = {one.name: file.prompts for one, file in held_out}
            return PairEvaluator(self._run_id, pairs, policy)

        def scorer_of(rewards: tuple[RewardTermConfig, ...], mode: RewardMode) -> Scorer:
            # The rewards of the run share calls with its rollouts.
            if (rewards, mode) == (self._config.rewards, self._config.reward_mode):
                return scorer
            return self._scorer(rewards, mode)

        sets = held_out_prompts(self._config, held_out, scorer_of)
        rollout = self._config.rollout
        return Evaluator(
            self._run_id, sets, sampler, rollout.sample_timeout_s, rollout.max_reward_failure_rate
        )


def _void_by(sync: WeightSync) -> Callable[[RolloutSample], bool]:
    """Return what tells of a sample with verified versions whether a generator with other weights wrote it."""
    return lambda sample: sync.disowns(sample.instance_ids, [span.version for span in sample.spans])
