"""A training loop of one's own: the primitives of a run whose steps a client makes, for asyncio.

Invariants: every call has a deadline; a call that changes something carries an id, so that it acts once however often
it is sent; nothing of the policy is kept here but the version that the service last reported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.loop_pb2_grpc import LoopServiceStub
from flotilla.trainer.v1.session_pb2 import Function
from flotilla_client.groups import Group, Prompt
from flotilla_core import rpc
from flotilla_core.config.losses import LossSection
from flotilla_core.errors import FailedPrecondition, InvalidRequest, NotFinite
from flotilla_core.ids import new_request_id
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version

if TYPE_CHECKING:
    # A class of the typed stubs only.
    from flotilla.coordinator.v1.loop_pb2_grpc import LoopServiceAsyncStub

Loss = str | Mapping[str, Any]
"""`sft`, a loss by its name, or one with parameters as in `algorithm.loss`: {"type": "ppo", "clip_high": 0.28}."""

_OPEN_S = 1800.0
_STEP_S = 3600.0
_CALL_S = 60.0
_LOSSES: TypeAdapter[Any] = TypeAdapter(LossSection)


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    version: Version
    metrics: dict[str, float]
    skipped: str
    """The reason why no step was made; empty when one was."""


@dataclass(frozen=True)
class HeldOutResult:
    """The figures of one held-out set, as docs/evaluation.md defines them."""

    prompts: int
    """The number of prompts, or of pairs of answers."""
    accuracy: float
    accuracy_stderr: float
    """NaN for a single prompt, and for pairs."""
    reward_mean: float
    """NaN for pairs."""
    reward_stderr: float
    """NaN where the error of the accuracy is."""
    pass_at: dict[int, float]
    """Values by k; empty where each prompt has one answer. The same holds for `maj_at`."""
    maj_at: dict[int, float]
    pass_at_stderr: dict[int, float]
    """Standard errors by k; empty for a single prompt."""
    maj_at_stderr: dict[int, float]
    unscored_rate: float
    """Share of the answers whose reward failed, which are in no other figure; NaN for pairs."""

    @classmethod
    def from_proto(cls, message: pb.HeldOutResult) -> HeldOutResult:
        """Read it from the wire."""

        def figure(name: str) -> float:
            return message.metrics.get(f"eval/{name}", float("nan"))

        def by_number(name: str) -> dict[int, float]:
            prefix = f"eval/{name}@"
            named = {int(key[len(prefix) :]): key for key in message.metrics if key.startswith(prefix)}
            return {number: message.metrics[named[number]] for number in sorted(named)}

        return cls(
            message.prompts,
            figure("accuracy"),
            figure("accuracy_stderr"),
            figure("reward_mean"),
            figure("reward_stderr"),
            by_number("pass"),
            by_number("maj"),
            by_number("stderr_pass"),
            by_number("stderr_maj"),
            figure("unscored_rate"),
        )


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation of all held-out sets."""

    version: Version
    """The version of the policy that was evaluated."""
    sets: dict[str, HeldOutResult]
    """Results by the names of the sets, in the order of the run file."""

    @classmethod
    def from_proto(cls, message: pb.EvaluatePolicyResponse) -> EvaluationResult:
        """Read it from the wire."""
        sets = {one.name: HeldOutResult.from_proto(one) for one in message.sets}
        return cls(Version.from_proto(message.policy_version), sets)

    @property
    def first(self) -> HeldOutResult:
        """The figures of the first set, or of the only one."""
        return next(iter(self.sets.values()))


class Loop:
    """The primitives of one open run; see docs/custom-loops.md."""

    def __init__(
        self, channel: grpc.aio.Channel, run_id: str, wait_run: Callable[[str], Awaitable[run_pb2.Run]]
    ) -> None:
        """`wait_run` returns a run after it has ended."""
        self._stub: LoopServiceAsyncStub = LoopServiceStub(channel)
        self._wait_run = wait_run
        self.run_id = run_id
        self.version = Version(0, 0)
        """The version of the policy that the trainer holds."""
        self.steps_done = 0
        self.directory = Path()

    async def open(self) -> None:
        """Wait until the run takes calls."""
        request = pb.OpenLoopRequest(run_id=self.run_id)
        reply = await rpc.unary(self._stub.OpenLoop, request, timeout_s=_OPEN_S)
        self.run_id, self.directory = reply.run_id, Path(reply.directory)
        self.version, self.steps_done = Version.from_proto(reply.policy_version), reply.steps_done

    async def prompts(self, count: int) -> list[Prompt]:
        """Return the next prompts of the run's data set."""
        request = pb.DrawPromptsRequest(run_id=self.run_id, count=count)
        reply = await rpc.unary(self._stub.DrawPrompts, request, timeout_s=_CALL_S, attempts=1)
        return [Prompt.from_proto(prompt) for prompt in reply.prompts]

    async def sample(
        self,
        prompts: Sequence[Prompt | str | Sequence[Mapping[str, Any]]],
        samples_per_prompt: int = 1,
        *,
        temperature: float | None = None,
        max_response_tokens: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
    ) -> list[Group]:
        """Samples of the weights that were synced last, in the order of the prompts: texts, chats or `Prompt`s."""
        if isinstance(stop, str):
            raise InvalidRequest("stop is one text", where="sample", next_step="give a list of texts")
        whole = [Prompt.of(prompt) for prompt in prompts]
        request = pb.SampleGroupsRequest(
            run_id=self.run_id,
            prompts=[prompt.to_proto() for prompt in whole],
            samples_per_prompt=samples_per_prompt,
            temperature=temperature,
            max_response_tokens=max_response_tokens,
            top_p=top_p,
            stop=stop,
        )
        groups: dict[int, Group] = {}
        stream = rpc.server_stream(self._stub.SampleGroups, request, idle_timeout_s=_STEP_S)
        async with aclosing(stream) as replies:
            async for reply in replies:
                groups[reply.index] = Group.from_proto(reply.group, whole[reply.index])
        return [groups[index] for index in range(len(whole))]

    async def score(self, groups: Sequence[Group]) -> list[NDArray[np.float64]]:
        """Rewards by group, also set in the samples; NaN, and the reason in `failure`, where there is none."""
        request = pb.ScoreGroupsRequest(run_id=self.run_id, groups=[group.to_proto() for group in groups])
        reply = await rpc.unary(self._stub.ScoreGroups, request, timeout_s=_STEP_S)
        scores = {score.sample_id: score for score in reply.scores}
        for group in groups:
            for sample in group.samples:
                score = scores[sample.sample_id]
                sample.failure = score.failure
                sample.reward = score.reward if score.HasField("reward") else float("nan")
        return [group.rewards for group in groups]

    async def logprobs(
        self, groups: Sequence[Group], *, temperature: float | None = None
    ) -> list[list[NDArray[np.float32]]]:
        """Return the log-probability of every response token under the trainer's policy, sample by sample."""
        sequences = [sequence for group in groups for sequence in group.sequences()]
        request = pb.ScoreTokensRequest(run_id=self.run_id, sequences=sequences, temperature=temperature)
        reply = await rpc.unary(self._stub.ScoreTokens, request, timeout_s=_STEP_S)
        found = {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}
        return [[found[sample.sample_id] for sample in group.samples] for group in groups]

    async def forward_backward(self, groups: Sequence[Group], loss: Loss | None = None) -> dict[str, float]:
        """Add the gradients of a batch to those that wait for `optim_step`; its metrics."""
        for sample in (sample for group in groups for sample in group.samples):
            if not np.isfinite(sample.reward):
                raise NotFinite(
                    f"the reward is {sample.reward}",
                    where=f"sample {sample.sample_id!r}",
                    why=sample.failure,
                    next_step="leave the sample out of its group, or give it a reward",
                )
        request = pb.AddGradientsRequest(
            run_id=self.run_id,
            request_id=new_request_id(),
            groups=[group.train_group() for group in groups],
            loss=None if loss is None else loss_function(loss),
        )
        reply = await rpc.unary(self._stub.AddGradients, request, timeout_s=_STEP_S)
        return dict(reply.metrics)

    async def optim_step(self, learning_rate: float | None = None) -> StepResult:
        """One step on the gradients that wait; without a rate, on that of the run's schedule."""
        if learning_rate is not None and not learning_rate > 0:
            raise InvalidRequest(f"the learning rate is {learning_rate}", why="a step needs one above 0")
        request = pb.StepOptimizerRequest(
            run_id=self.run_id, request_id=new_request_id(), learning_rate=learning_rate or 0.0
        )
        reply = await rpc.unary(self._stub.StepOptimizer, request, timeout_s=_STEP_S)
        self.version = Version.from_proto(reply.policy_version)
        self.steps_done += 1
        return StepResult(self.version, dict(reply.metrics), reply.skipped)

    async def sync(self) -> Version:
        """Bring the policy to every generator; later samples are drawn from it."""
        request = pb.SyncWeightsRequest(run_id=self.run_id, request_id=new_request_id())
        reply = await rpc.unary(self._stub.SyncWeights, request, timeout_s=_STEP_S)
        return Version.from_proto(reply.policy_version)

    async def evaluate(self) -> EvaluationResult:
        """Evaluate the weights that were synced last on the held-out sets of the run."""
        request = pb.EvaluatePolicyRequest(run_id=self.run_id)
        reply = await rpc.unary(self._stub.EvaluatePolicy, request, timeout_s=_STEP_S)
        return EvaluationResult.from_proto(reply)

    async def save(self) -> Path:
        """Save a checkpoint that `flotilla run resume` continues from; return when it is on disk."""
        request = pb.SaveStateRequest(run_id=self.run_id, request_id=new_request_id())
        return Path((await rpc.unary(self._stub.SaveState, request, timeout_s=_STEP_S)).path)

    async def save_model(self, path: str | Path | None = None) -> Path:
        """Write a Hugging Face folder of the policy; without a path, `model` in the run's directory."""
        where = "" if path is None else str(Path(path).absolute())
        request = pb.SaveModelRequest(run_id=self.run_id, request_id=new_request_id(), path=where)
        return Path((await rpc.unary(self._stub.SaveModel, request, timeout_s=_STEP_S)).path)

    async def close(self) -> None:
        """End the run as completed, and wait for its end; pending gradients are dropped."""
        await rpc.unary(self._stub.CloseLoop, pb.CloseLoopRequest(run_id=self.run_id), timeout_s=_CALL_S)
        run = await self._wait_run(self.run_id)
        if run.state != run_pb2.RUN_STATE_SUCCEEDED:
            raise FailedPrecondition("the run did not end as completed", where=self.run_id, why=run.reason)


def loss_function(loss: Loss) -> Function:
    """Return the loss on the wire, checked as in a run's configuration."""
    section = {"type": loss} if isinstance(loss, str) else dict(loss)
    function = Function(name=str(section.get("type", "")))
    if section == {"type": "sft"}:
        return function
    try:
        checked = _LOSSES.validate_python(section).with_paths_from(Path.cwd())
    except ValidationError as error:
        raise InvalidRequest(
            f"{function.name or 'a loss without a type'} cannot be used so",
            where="loss",
            why="; ".join(problem["msg"] for problem in error.errors()),
            next_step="write it as `algorithm.loss` of a run; `sft` imitates the responses",
        ) from error
    function.name = checked.type
    function.parameters.update(checked.arguments)
    return function
