"""The steps of a run that a client makes, call by call, through the collaborators of the built-in loop.

Invariants: calls that change the policy, publish it or save it take turns and come to their end when their caller goes
away; a repeated call acts and is recorded once, and a step is recorded before anything builds on it; the loss of the
trainer ends the run, because what the client knows of the policy would not be true any more; no call outlives the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla.reward.v1 import reward_pb2
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_coordinator.clients.client_sampling import ClientPrompt, ClientSampling
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup
from flotilla_coordinator.rollouts.batch_metrics import batch_metrics
from flotilla_coordinator.rollouts.samples import ledger_sample
from flotilla_coordinator.rollouts.scoring import Outcome, Scorer
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.learned import Learned
from flotilla_coordinator.weights.sync_report import SyncReport
from flotilla_core import ids, rpc, telemetry
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    RankFailed,
    Unavailable,
)
from flotilla_core.telemetry import names
from flotilla_core.version import Version

T = TypeVar("T")

STEP_TIMEOUT_S = 3600.0
KEPT_STEPS = 64
IDLE = "waiting for the client"
# With these a call may fail because the trainer's session is gone.
MAYBE_LOST = (Unavailable, RankFailed, DeadlineExceeded, FailedPrecondition)


@dataclass(frozen=True)
class MadeStep:
    """What the trainer made of a step, until every record has it."""

    request_id: str
    step: int
    version: Version
    reply: train.OptimStepResponse


class ClientLoop:
    """What a client may do with one run."""

    def __init__(
        self,
        run: RunContext,
        prompts: PromptSource,
        sampling: ClientSampling,
        scorer: Scorer,
        trainer_lost: Callable[[FlotillaError], None],
    ) -> None:
        self._run = run
        self._prompts = prompts
        self._scorer = scorer
        self._trainer_lost = trainer_lost
        self._turn = asyncio.Lock()
        self._over = asyncio.Event()
        self._failure: FlotillaError | None = None
        self._works: set[asyncio.Task[Any]] = set()
        self._rewards: dict[str, float] = {}
        self._steps: OrderedDict[str, train.OptimStepResponse] = OrderedDict()
        self._unrecorded: MadeStep | None = None
        self._step_began = self._heard_at = time.monotonic()
        self.sampling = sampling

    @property
    def run(self) -> RunContext:
        """The run that is driven."""
        return self._run

    async def serve(self) -> str:
        """Until the client closes the loop; why it was given up where the client went silent.

        Raises what made further calls useless.
        """
        self._step_began = self._heard_at = time.monotonic()
        self._run.status.enter(IDLE)
        silence = await self._silence()
        self.end()
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            if silence and self._run.checkpoints.wanted:
                with self._run.phase("checkpoint"):
                    await self._save()
        return silence

    def heard(self) -> None:
        """The client is there."""
        self._heard_at = time.monotonic()

    def end(self) -> None:
        """Take no further calls."""
        self._over.set()

    async def close(self) -> None:
        """Give up what is still under way."""
        self.end()
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, self.sampling.close(), return_exceptions=True)

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of the data set."""
        self._check_open()
        return [self._prompts.next() for _ in range(count)]

    async def groups(
        self, prompts: Sequence[ClientPrompt], count: int, changes: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, RolloutGroup]]:
        """Groups from the weights that the generators serve, as they are complete."""
        self._check_open()
        sampling = self._sampling_with(changes)
        version = self._run.sync.version
        assert version is not None, "the first version was published before the first call"
        groups = self.sampling.groups(prompts, count, sampling, version, self._run.steps_done)
        with self._told_when_over():
            async with aclosing(groups):
                async for index, group in groups:
                    yield index, group
                    self.heard()

    async def scores(self, items: list[reward_pb2.ScoreItem]) -> dict[str, Outcome]:
        """What the rewards of the run make of samples."""
        self._check_open()
        if not self._run.config.rewards:
            raise InvalidRequest(
                "the run has no rewards", where=f"run {self._run.run_id}", next_step="name them in `rewards`"
            )
        return await self._while_open(self._scorer.score(items))

    async def logprobs(
        self, sequences: Sequence[train.ScoredSequence], temperature: float
    ) -> train.ComputeLogprobsResponse:
        """Of given tokens under the policy as the trainer holds it."""
        request = train.ComputeLogprobsRequest(
            run_id=self._run.run_id, sequences=sequences, temperature=temperature
        )
        self._check_open()
        method = self._run.policy.stub.ComputeLogprobs
        return await self._while_open(rpc.unary(method, request, timeout_s=STEP_TIMEOUT_S))

    async def add_gradients(self, request: pb.AddGradientsRequest) -> train.ForwardBackwardResponse:
        """Gradients of a batch, added to those that wait for their step."""
        # Without an id of its own, a call that is sent again over a broken connection would count twice.
        request_id = request.request_id or ids.new_request_id()
        asked = train.ForwardBackwardRequest(
            run_id=self._run.run_id, request_id=request_id, groups=request.groups
        )
        if request.HasField("loss"):
            asked.loss.CopyFrom(request.loss)
        rewards = {s.sample_id: s.reward for group in request.groups for s in group.samples}

        async def act() -> train.ForwardBackwardResponse:
            async with self._step_of("forward and backward"):
                method = self._run.policy.stub.ForwardBackward
                reply: train.ForwardBackwardResponse = await rpc.unary(
                    method, asked, timeout_s=STEP_TIMEOUT_S
                )
                self._rewards |= rewards
                return reply

        return await self._whole(act())

    async def step_optimizer(self, request_id: str, rate: float) -> train.OptimStepResponse:
        """One optimizer step, recorded as a step of the run."""
        request_id = request_id or ids.new_request_id()
        return await self._whole(self._step_optimizer(request_id, rate))

    async def sync(self) -> SyncReport:
        """Bring the policy to the generators."""

        async def act() -> SyncReport:
            async with self._step_of("sync"):
                return await self._run.sync.publish(self._run.policy.version)

        return await self._whole(act())

    async def evaluate(self) -> tuple[Version, float]:
        """Accuracy on held-out prompts, and the version that was asked."""

        async def act() -> tuple[Version, float]:
            async with self._step_of("evaluate"):
                evaluator, version = self._run.evaluator, self._run.sync.version
                if evaluator is None or version is None:
                    raise FailedPrecondition(
                        "the run has no held-out prompts",
                        where=f"run {self._run.run_id}",
                        next_step="name them in `evaluation`",
                    )
                evaluation = await evaluator.evaluate(version, self._run.steps_done)
                self._run.record_evaluation(self._run.steps_done, version, evaluation)
                return version, evaluation.accuracy

        return await self._whole(act())

    async def save_state(self) -> Path:
        """A checkpoint of the run, on disk."""

        async def act() -> Path:
            async with self._step_of("checkpoint"):
                name, shelf = await self._save(), self._run.checkpoints.shelf
                if name not in shelf.names():
                    raise Unavailable(
                        f"checkpoint {name} was not written",
                        where=f"run {self._run.run_id}",
                        next_step="the last notice of `flotilla run watch` says why; save again",
                    )
                return shelf.folder(name)

        return await self._whole(act())

    async def save_model(self, path: Path) -> Path:
        """A Hugging Face folder of the policy."""

        async def act() -> Path:
            async with self._step_of("export"):
                await self._run.policy.export(path)
                return path

        return await self._whole(act())

    async def _silence(self) -> str:
        """Wait for the end of the loop, or until the client has been silent for too long: that, in words."""
        limit_s = self._run.config.loop_idle_timeout_s
        while not self._over.is_set():
            busy = bool(self._works) or self.sampling.busy
            left_s = limit_s if busy else self._heard_at + limit_s - time.monotonic()
            if left_s <= 0:
                return f"no call of its client came for {limit_s:g} s (loop_idle_timeout_s)"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), left_s)
        return ""

    async def _save(self) -> str:
        """The name of a checkpoint of the steps done, on disk unless its writing failed."""
        await self._record()
        checkpoints, steps = self._run.checkpoints, self._run.steps_done
        name = CheckpointShelf.name_of(steps)
        if name not in checkpoints.shelf.names():
            await checkpoints.save(self._run.progress(steps))
            await checkpoints.settle()
        return name

    async def _step_optimizer(self, request_id: str, rate: float) -> train.OptimStepResponse:
        run = self._run
        async with self._step_of("optimizer step"):
            await self._record()
            if request_id in self._steps:
                return self._steps[request_id]
            version, step = run.policy.version, run.steps_done
            request = train.OptimStepRequest(run_id=run.run_id, request_id=request_id, learning_rate=rate)
            attributes: dict[str, Any] = {names.RUN_ID: run.run_id, names.STEP: step}
            with telemetry.span(names.RL_TRAIN, attributes=attributes):
                reply: train.OptimStepResponse = await rpc.unary(
                    run.policy.stub.OptimStep, request, timeout_s=STEP_TIMEOUT_S
                )
            run.policy.version = Version.from_proto(reply.policy_version)
            self._unrecorded = MadeStep(request_id, step, version, reply)
            await self._record()
        return reply

    async def _record(self) -> None:
        """The step that was made last and the samples that it used for the first time, in every record.

        Where one of them failed, the next call that counts on the step comes here again.
        """
        if (made := self._unrecorded) is None:
            return
        run, reply = self._run, made.reply
        # Calls whose gradients were dropped are no part of the step.
        rewards = {
            sample_id: self._rewards[sample_id]
            for sample_id in reply.sample_ids
            if sample_id in self._rewards
        }
        batch = Batch(made.step, self.sampling.unused(rewards), self._prompts.cursor)
        batch.metrics.update(batch_metrics(batch, made.version))
        if reply.skipped:
            # Nothing was trained: the samples stay as they are, for a later step or for the end of the run.
            batch.groups = []
        await run.ledger.group_scored([ledger_sample(sample) for sample in batch.samples])
        update = train.UpdateResult(
            update_id=ids.update_id(run.run_id, Version(made.version.lineage, made.step + 1)),
            policy_version=reply.policy_version,
            skipped=reply.skipped,
            metrics=reply.metrics,
        )
        await run.record_update(made.step, made.version, batch, Learned(update))
        now = time.monotonic()
        run.end_step(made.step, now - self._step_began)
        run.metrics.clear()
        self._step_began = now
        self.sampling.use(sample.sample_id for sample in batch.samples)
        for sample_id in rewards:
            del self._rewards[sample_id]
        self._unrecorded = None
        self._steps[made.request_id] = reply
        while len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)

    @asynccontextmanager
    async def _step_of(self, phase: str) -> AsyncIterator[None]:
        """The turn of one call, named to whoever watches the run."""
        async with self._turn:
            self._check_open()
            try:
                with self._run.phase(phase):
                    yield
            except MAYBE_LOST as error:
                if await self._run.policy.lost():
                    self._trainer_lost(error)
                    self._failure = error
                    self.end()
                raise
            finally:
                self._run.status.enter(IDLE)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that goes on when its caller goes away."""
        with self._told_when_over():
            return await asyncio.shield(self._begun(work))

    async def _while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that ends with its caller, or with the loop."""
        with self._told_when_over():
            return await self._begun(work)

    def _begun(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._works.discard(work)
        self.heard()

    @contextmanager
    def _told_when_over(self) -> Iterator[None]:
        """Where the end of the loop cancels work under a caller who is still there, the caller hears why."""
        try:
            yield
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                self._check_open()
            raise

    def _sampling_with(self, changes: dict[str, Any]) -> SamplingConfig:
        """The sampling of the run, changed for one call."""
        try:
            return SamplingConfig.model_validate(self._run.config.rollout.sampling.model_dump() | changes)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise InvalidRequest(
                "nothing can be sampled so",
                where=f"run {self._run.run_id}",
                why="; ".join(problems),
                next_step="the limits are those of `rollout.sampling` in a run file",
            ) from error

    def _check_open(self) -> None:
        if self._over.is_set():
            raise Cancelled(
                f"the loop of run {self._run.run_id} takes no further calls",
                why=str(self._failure or "it was closed or stopped"),
                next_step=f"see `flotilla run show {self._run.run_id}`",
            )
