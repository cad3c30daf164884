"""Makes the steps of a run call by call for a client, with the same parts as the built-in loop.

Invariants: calls that change the policy, publish it or save it exclude each other, and are completed even when their
caller goes away; a repeated call acts once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla.reward.v1 import reward_pb2
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.evaluation.evaluate import Evaluation
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_coordinator.rollouts.scoring import Outcome, Scorer
from flotilla_coordinator.runs.client.calls import ClientCalls
from flotilla_coordinator.runs.client.sampling import ClientPrompt, ClientSampling
from flotilla_coordinator.runs.client.steps import STEP_TIMEOUT_S, ClientSteps
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.weights.members import SyncReport
from flotilla_core import ids, rpc
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidRequest, Unavailable
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version

MOST_GROUPS, MOST_SAMPLES = 100_000, 2_000_000
"""The limits of one call; the event loop begins them in one turn, as it does for the built-in loop."""
LARGEST_RATE = 1


class ClientLoop:
    """The calls that a client can make to one run."""

    def __init__(
        self,
        run: RunContext,
        prompts: PromptSource,
        sampling: ClientSampling,
        scorer: Scorer,
        trainer_lost: Callable[[FlotillaError], None],
    ) -> None:
        self.run = run
        self._prompts = prompts
        self._scorer = scorer
        self.calls = ClientCalls(run, trainer_lost)
        self._steps = ClientSteps(run, prompts, sampling)
        self.sampling = sampling

    async def serve(self) -> str:
        """Serve until the client closes the loop; return the reason where the client went silent.

        Raises: FlotillaError: The error after which further calls are useless.
        """
        self._steps.begin()
        self.calls.begin()
        silence = await self.calls.silence(lambda: self.sampling.busy)
        self.calls.end()
        async with self.calls.alone():
            if self.calls.failure is not None:
                raise self.calls.failure
            if silence and self.run.checkpoints.wanted:
                with self.run.phase("checkpoint"):
                    await self._save()
        return silence

    async def close(self) -> None:
        """Cancel what is still under way."""
        await self.calls.close()
        await self.sampling.close()

    def draw(self, count: int) -> list[Prompt]:
        """Return the next prompts of the data set."""
        self.calls.check_open()
        _refuse_above(MOST_GROUPS, count, "count", "prompts")
        return [self._prompts.next(self.run.steps_done) for _ in range(count)]

    async def groups(
        self, prompts: Sequence[ClientPrompt], count: int, changes: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, RolloutGroup]]:
        """Yield groups from the version that the generators serve, each as soon as it is complete."""
        self.calls.check_open()
        _refuse_above(MOST_GROUPS, len(prompts), "prompts", "groups")
        _refuse_above(MOST_SAMPLES, len(prompts) * count, "samples_per_prompt", "samples")
        sampling = self._sampling_with(changes)
        version = self.run.sync.version
        assert version is not None, "the first version was published before the first call"
        groups = self.sampling.groups(prompts, count, sampling, version, self.run.steps_done)
        with self.calls.told_when_over():
            async with aclosing(groups):
                async for index, group in groups:
                    yield index, group
                    self.calls.heard()

    async def scores(self, items: list[reward_pb2.ScoreItem]) -> dict[str, Outcome]:
        """Score samples by the rewards of the run."""
        self.calls.check_open()
        if not self.run.config.rewards:
            raise InvalidRequest(
                "the run has no rewards", where=f"run {self.run.run_id}", next_step="name them in `rewards`"
            )
        outcomes = await self.calls.while_open(self._scorer.score(items))
        self.sampling.scored(outcomes)
        return outcomes

    async def logprobs(
        self, sequences: Sequence[train.ScoredSequence], temperature: float
    ) -> train.ComputeLogprobsResponse:
        """Return the log-probabilities of given tokens under the trainer's policy."""
        request = train.ComputeLogprobsRequest(
            run_id=self.run.run_id, sequences=sequences, temperature=temperature
        )
        self.calls.check_open()
        method = self.run.policy.stub.ComputeLogprobs
        return await self.calls.while_open(rpc.unary(method, request, timeout_s=STEP_TIMEOUT_S))

    async def add_gradients(self, request: pb.AddGradientsRequest) -> train.ForwardBackwardResponse:
        """Add the gradients of a batch to those that wait for the next optimizer step."""
        # Without an id of its own, a call that is repeated after a broken connection would count twice.
        request_id = request.request_id or ids.new_request_id()
        asked = train.ForwardBackwardRequest(
            run_id=self.run.run_id, request_id=request_id, groups=request.groups
        )
        if request.HasField("loss"):
            asked.loss.CopyFrom(request.loss)
        samples = [sample for group in request.groups for sample in group.samples]
        rewards = {sample.sample_id: sample.reward for sample in samples}
        responses = {s.sample_id: from_tensor(s.token_ids) for s in samples if s.HasField("token_ids")}

        async def act() -> train.ForwardBackwardResponse:
            async with self.calls.exclusive("forward and backward"):
                method = self.run.policy.stub.ForwardBackward
                reply: train.ForwardBackwardResponse = await rpc.unary(
                    method, asked, timeout_s=STEP_TIMEOUT_S
                )
                self._steps.add(rewards)
                self.sampling.continued(responses)
                return reply

        return await self.calls.shielded(act())

    async def step_optimizer(self, request_id: str, rate: float) -> train.OptimStepResponse:
        """Make one optimizer step, and record it as a step of the run."""
        if not 0 <= rate <= LARGEST_RATE:
            raise InvalidRequest(
                f"a learning rate of {rate} is not between 0 and {LARGEST_RATE}",
                where="learning_rate",
                next_step="optimizer.learning_rate of a run file has the same bounds",
            )
        request_id = request_id or ids.new_request_id()

        async def act() -> train.OptimStepResponse:
            async with self.calls.exclusive("optimizer step"):
                return await self._steps.make(request_id, rate)

        return await self.calls.shielded(act())

    async def sync(self) -> SyncReport:
        """Send the policy to the generators."""

        async def act() -> SyncReport:
            async with self.calls.exclusive("sync"):
                report = await self.run.sync.publish(self.run.policy.version)
                await self.run.sync.settled()
                return report

        return await self.calls.shielded(act())

    async def evaluate(self) -> tuple[Version, Evaluation]:
        """Evaluate the held-out sets; also return the version that was evaluated."""

        async def act() -> tuple[Version, Evaluation]:
            async with self.calls.exclusive("evaluate"):
                evaluator, version = self.run.evaluator, self.run.sync.version
                if evaluator is None or version is None:
                    raise FailedPrecondition(
                        "the run has no held-out prompts",
                        where=f"run {self.run.run_id}",
                        next_step="name them in `evaluation`",
                    )
                evaluation = await evaluator.evaluate(version, self.run.steps_done)
                await self.run.record_evaluation(self.run.steps_done, version, evaluation)
                return version, evaluation

        return await self.calls.shielded(act())

    async def save_state(self) -> Path:
        """Write a checkpoint of the run to disk."""

        async def act() -> Path:
            async with self.calls.exclusive("checkpoint"):
                name, shelf = await self._save(), self.run.checkpoints.shelf
                if name not in shelf.names():
                    raise Unavailable(
                        f"checkpoint {name} was not written",
                        where=f"run {self.run.run_id}",
                        next_step="the last notice of `flotilla run watch` says why; save again",
                    )
                return shelf.folder(name)

        return await self.calls.shielded(act())

    async def save_model(self, path: Path) -> Path:
        """Write the policy as a Hugging Face folder."""

        async def act() -> Path:
            async with self.calls.exclusive("export"):
                await self.run.policy.export(path, self.run.config.export_dtype)
                return path

        return await self.calls.shielded(act())

    async def _save(self) -> str:
        """Save a checkpoint of the steps done and return its name; it is on disk unless the save failed."""
        await self._steps.record()
        checkpoints, steps = self.run.checkpoints, self.run.steps_done
        name = CheckpointShelf.name_of(steps)
        if name not in checkpoints.shelf.names():
            await checkpoints.save(self.run.progress(steps))
            await checkpoints.settle()
        return name

    def _sampling_with(self, changes: dict[str, Any]) -> SamplingConfig:
        """Return the sampling settings of the run with the changes for one call."""
        try:
            return SamplingConfig.model_validate(self.run.config.rollout.sampling.model_dump() | changes)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise InvalidRequest(
                "nothing can be sampled so",
                where=f"run {self.run.run_id}",
                why="; ".join(problems),
                next_step="the limits are those of `rollout.sampling` in a run file",
            ) from error


def _refuse_above(limit: int, asked: int, where: str, what: str) -> None:
    if asked > limit:
        raise InvalidRequest(
            f"{asked:,} {what} of one call are too many",
            where=where,
            why=f"{limit:,} is the limit",
            next_step="ask for them in several calls",
        )
