"""Implements LoopService, with which a client makes the steps of a run.

Invariants: it has no state of its own; every call names its run, and the refusal of a call says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from flotilla.common.v1 import version_pb2
from flotilla.common.v1.chat_pb2 import Message
from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla.coordinator.v1.loop_pb2_grpc import LoopServiceServicer
from flotilla.reward.v1 import reward_pb2
from flotilla_coordinator.data.chat_turns import Chat
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.registry import Runs
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.structs import to_json
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_data.chats import chat_of, loaded, tools_of

Context = grpc.aio.ServicerContext[Any, Any]


class LoopServicer(LoopServiceServicer):
    """Answers the clients that make the steps of runs."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def OpenLoop(self, request: pb.OpenLoopRequest, context: Context) -> pb.OpenLoopResponse:
        """Wait until the run takes calls."""
        run_id = (await self._runs.find(request.run_id)).run_id
        active = self._runs.active(run_id)
        if active is not None and active.config.loop == "client" and active.task is not None:
            opened = asyncio.ensure_future(active.opened.wait())
            try:
                await asyncio.wait({opened, active.task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                opened.cancel()
        run = (await self._loop(run_id)).run
        return pb.OpenLoopResponse(
            run_id=run_id,
            policy_version=run.policy.version.to_proto(),
            steps_done=run.steps_done,
            directory=str(run.directory.path),
        )

    async def DrawPrompts(self, request: pb.DrawPromptsRequest, context: Context) -> pb.DrawPromptsResponse:
        """Return the next prompts of the data set."""
        loop = await self._loop(request.run_id)
        return pb.DrawPromptsResponse(
            prompts=[_prompt_message(prompt) for prompt in loop.draw(request.count)]
        )

    async def SampleGroups(
        self, request: pb.SampleGroupsRequest, context: Context
    ) -> AsyncIterator[pb.SampleGroupsResponse]:
        """Stream each group as soon as it is complete."""
        loop = await self._loop(request.run_id)
        if not request.prompts or not request.samples_per_prompt:
            raise InvalidRequest("there is nothing to sample", where="prompts, samples_per_prompt")
        prompts = []
        for index, prompt in enumerate(request.prompts):
            where = f"prompt {index}"
            chat = _chat(prompt, where)
            if not prompt.text and chat is None and not prompt.HasField("token_ids"):
                raise InvalidRequest("the prompt is empty", where=where)
            given = from_tensor(prompt.token_ids) if prompt.HasField("token_ids") else None
            prompts.append(
                loop.sampling.prompt(
                    prompt.text,
                    given,
                    prompt.conversation,
                    answer=prompt.answer,
                    info=to_json(prompt.info),
                    chat=chat,
                )
            )
        changes: dict[str, Any] = {
            name: getattr(request, name)
            for name in ("temperature", "max_response_tokens", "top_p")
            if request.HasField(name)
        }
        if request.stop:
            changes["stop"] = tuple(request.stop)
        async with aclosing(loop.groups(prompts, request.samples_per_prompt, changes)) as groups:
            async for index, group in groups:
                yield pb.SampleGroupsResponse(
                    index=index, group=_group_message(group, request.prompts[index])
                )

    async def ScoreGroups(self, request: pb.ScoreGroupsRequest, context: Context) -> pb.ScoreGroupsResponse:
        """Score samples by the rewards of the run."""
        loop = await self._loop(request.run_id)
        items = [
            _score_item(group, sample, loop.run.steps_done)
            for group in request.groups
            for sample in group.samples
        ]
        outcomes = await loop.scores(items)
        reply = pb.ScoreGroupsResponse()
        for item in items:
            outcome = outcomes[item.sample_id]
            if outcome.total is None:
                reply.scores.add(sample_id=item.sample_id, failure=outcome.failure)
            else:
                reply.scores.add(sample_id=item.sample_id, reward=outcome.total)
        return reply

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        """Return log-probabilities under the trainer's policy."""
        loop = await self._loop(request.run_id)
        sampling = loop.run.config.rollout.sampling
        temperature = request.temperature if request.HasField("temperature") else sampling.temperature
        reply = await loop.logprobs(request.sequences, temperature)
        return pb.ScoreTokensResponse(policy_version=reply.policy_version, sequences=reply.sequences)

    async def AddGradients(
        self, request: pb.AddGradientsRequest, context: Context
    ) -> pb.AddGradientsResponse:
        """Run the forward and the backward pass of a batch, and add its gradients."""
        reply = await (await self._loop(request.run_id)).add_gradients(request)
        return pb.AddGradientsResponse(policy_version=reply.policy_version, metrics=reply.metrics)

    async def StepOptimizer(
        self, request: pb.StepOptimizerRequest, context: Context
    ) -> pb.StepOptimizerResponse:
        """Apply the gradients: one step of the run."""
        loop = await self._loop(request.run_id)
        reply = await loop.step_optimizer(request.request_id, request.learning_rate)
        return pb.StepOptimizerResponse(
            policy_version=reply.policy_version, metrics=reply.metrics, skipped=reply.skipped
        )

    async def SyncWeights(self, request: pb.SyncWeightsRequest, context: Context) -> pb.SyncWeightsResponse:
        """Send the policy to the generators."""
        report = await (await self._loop(request.run_id)).sync()
        return pb.SyncWeightsResponse(
            policy_version=report.version.to_proto(),
            bytes=report.bytes,
            generators=[member.name for member in report.members],
        )

    async def EvaluatePolicy(
        self, request: pb.EvaluatePolicyRequest, context: Context
    ) -> pb.EvaluatePolicyResponse:
        """Evaluate the held-out sets."""
        version, found = await (await self._loop(request.run_id)).evaluate()
        reply = pb.EvaluatePolicyResponse(policy_version=version.to_proto())
        for name, of in found.sets.items():
            reply.sets.add(name=name, prompts=of.prompts, metrics=of.metrics)
        return reply

    async def SaveState(self, request: pb.SaveStateRequest, context: Context) -> pb.SaveStateResponse:
        """Write a checkpoint."""
        return pb.SaveStateResponse(path=str(await (await self._loop(request.run_id)).save_state()))

    async def SaveModel(self, request: pb.SaveModelRequest, context: Context) -> pb.SaveModelResponse:
        """Write the policy as a Hugging Face folder."""
        loop = await self._loop(request.run_id)
        path = Path(request.path) if request.path else loop.run.directory.model_path
        return pb.SaveModelResponse(path=str(await loop.save_model(path)))

    async def CloseLoop(self, request: pb.CloseLoopRequest, context: Context) -> pb.CloseLoopResponse:
        """End the run successfully."""
        (await self._loop(request.run_id)).calls.end()
        return pb.CloseLoopResponse()

    async def _loop(self, run_id: str) -> ClientLoop:
        """Return the loop of a run that takes calls."""
        active = self._runs.active(run_id)
        if active is not None and active.client is not None and active.opened.is_set():
            active.client.calls.heard()
            return active.client
        run = await self._runs.find(run_id)
        if active is None:
            why = run.reason or "it has ended"
        elif active.config.loop == "client":
            why = f"it is not open yet: {run.phase}"
        else:
            why = "the coordinator makes its steps"
        raise FailedPrecondition(
            f"run {run.run_id} takes no calls of a loop",
            why=why,
            next_step="start a run with `loop: client`, or wait for this one with OpenLoop",
        )


def _chat(prompt: pb.LoopPrompt, where: str) -> Chat | None:
    """Return the chat of a prompt in the form of those in data files."""
    given = [MessageToDict(one, preserving_proto_field_name=True) for one in prompt.chat]
    tools = tools_of([loaded(one.function) for one in prompt.tools], where)
    messages = chat_of(given, where)
    if messages is None:
        raise InvalidRequest("a chat message has no role", where=where)
    if prompt.tools and not (messages and tools):
        raise InvalidRequest("a tool has no name" if messages else "the tools have no chat", where=where)
    return Chat(messages, tools, where) if messages else None


def _prompt_message(prompt: Prompt) -> pb.LoopPrompt:
    info = Struct()
    info.update(prompt.info)
    return pb.LoopPrompt(
        text=prompt.prompt_text, token_ids=to_tensor(prompt.token_ids), answer=prompt.answer, info=info
    )


def _group_message(group: RolloutGroup, prompt: pb.LoopPrompt) -> pb.LoopGroup:
    """Return the group with its prompt as requested, and the prompt's tokens."""
    message = pb.LoopGroup(group_id=group.group_id, prompt=prompt)
    message.prompt.text = group.prompt_text
    message.prompt.token_ids.CopyFrom(to_tensor(group.prompt_token_ids))
    for sample in group.samples:
        assert sample.logprobs is not None, "rollouts always carry logprobs"
        message.samples.add(
            sample_id=sample.sample_id,
            text=sample.text,
            token_ids=to_tensor(sample.token_ids),
            logprobs=to_tensor(sample.logprobs),
            truncated=sample.truncated,
            version_spans=[
                version_pb2.VersionSpan(version=span.version.to_proto(), start=span.start, end=span.end)
                for span in sample.spans
            ],
        )
    return message


def _score_item(group: pb.LoopGroup, sample: pb.LoopSample, step: int) -> reward_pb2.ScoreItem:
    prompt = group.prompt
    return reward_pb2.ScoreItem(
        sample_id=sample.sample_id,
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        info=prompt.info,
        chat=[Message(role=one.role, content=one.content) for one in prompt.chat],
        group=group.group_id,
        token_ids=sample.token_ids if sample.HasField("token_ids") else None,
        step=step,
    )
