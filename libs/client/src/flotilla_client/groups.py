"""Prompts, samples and groups as a training loop holds them.

Invariants: token ids and log-probabilities are those that were sampled, never made again from text; what a loop may set
(reward, advantages, mask) goes to the trainer as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from numpy.typing import NDArray

from flotilla.common.v1.chat_pb2 import Message, Tool, ToolCall
from flotilla.common.v1.version_pb2 import VersionSpan
from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla.trainer.v1 import trainer_pb2
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor


@dataclass
class Prompt:
    """Text, tokens, or a chat, to be continued."""

    text: str = ""
    token_ids: NDArray[np.int32] | None = None
    """The tokens of the prompt; None takes those of the text."""
    answer: str = ""
    """The answer that rewards compare with."""
    info: dict[str, Any] = field(default_factory=dict)
    """Other columns of the data set, for rewards."""
    conversation: str = ""
    """Any name; prompts that share it go to one generator while it has room, because its cache knows their
    beginning."""
    messages: Sequence[Mapping[str, Any]] = ()
    """A chat in place of a text: `role` and `content` of each message, and the `tool_calls` and `tool_call_id` of
    OpenAI's chats. The model's template renders it, and the group that comes back has the rendered text and its
    tokens."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that the model may call, each as `{"type": "function", "function": {...}}`."""

    @classmethod
    def of(cls, given: Prompt | str | Sequence[Mapping[str, Any]]) -> Prompt:
        """Return a prompt from itself, a text, or the messages of a chat."""
        if isinstance(given, Prompt):
            return given
        return cls(given) if isinstance(given, str) else cls(messages=given)

    @classmethod
    def from_proto(cls, message: pb.LoopPrompt) -> Prompt:
        """Read it from the wire."""
        ids = from_tensor(message.token_ids) if message.HasField("token_ids") else None
        return cls(
            message.text,
            ids,
            message.answer,
            json_format.MessageToDict(message.info),
            message.conversation,
        )

    def to_proto(self) -> pb.LoopPrompt:
        """Return its message for the wire."""
        info = Struct()
        info.update(self.info)
        ids = None if self.token_ids is None else to_tensor(_int32(self.token_ids))
        return pb.LoopPrompt(
            text=self.text,
            token_ids=ids,
            answer=self.answer,
            info=info,
            conversation=self.conversation,
            chat=map(_message, self.messages),
            tools=[Tool(function=_json(one["function"])) for one in self.tools],
        )


@dataclass
class Sample:
    """One response."""

    sample_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    """The log-probabilities of the rollout; losses with a ratio need them."""
    text: str = ""
    truncated: bool = False
    version_spans: Sequence[VersionSpan] = ()
    """The versions that wrote the response, each with its tokens."""
    reward: float = 0.0
    failure: str = ""
    """The reason why it could not be scored."""
    advantages: float | NDArray[np.float32] | None = None
    """One number, or one a token; where no sample has any, the trainer makes them from the rewards."""
    mask: NDArray[np.bool_] | None = None
    """Tokens to train; empty: all."""

    def train_sample(self) -> trainer_pb2.TrainSample:
        """Return its message for the trainer."""
        length = len(self.token_ids)
        sample = trainer_pb2.TrainSample(
            sample_id=self.sample_id,
            token_ids=to_tensor(_int32(self.token_ids)),
            reward=self.reward,
            truncated=self.truncated,
            version_spans=self.version_spans,
        )
        if self.logprobs is not None:
            sample.logprobs.CopyFrom(to_tensor(np.asarray(self.logprobs, np.float32)))
        if self.advantages is not None:
            advantages = np.asarray(self.advantages, np.float32)
            spread = np.full(length, advantages, np.float32) if advantages.ndim == 0 else advantages
            sample.advantages.CopyFrom(to_tensor(spread))
        if self.mask is not None:
            sample.mask.CopyFrom(to_tensor(np.asarray(self.mask, np.bool_)))
        return sample

    def to_proto(self) -> pb.LoopSample:
        """Return its message for the rewards."""
        return pb.LoopSample(
            sample_id=self.sample_id, text=self.text, token_ids=to_tensor(_int32(self.token_ids))
        )


@dataclass
class Group:
    """The samples of one prompt."""

    group_id: str
    prompt: Prompt
    samples: list[Sample]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """One a sample."""
        return np.array([sample.reward for sample in self.samples])

    @classmethod
    def from_proto(cls, message: pb.LoopGroup, prompt: Prompt) -> Group:
        """Read it from the wire, as the answer to a prompt."""
        samples = [
            Sample(
                sample_id=sample.sample_id,
                token_ids=from_tensor(sample.token_ids),
                logprobs=from_tensor(sample.logprobs),
                text=sample.text,
                truncated=sample.truncated,
                version_spans=tuple(sample.version_spans),
            )
            for sample in message.samples
        ]
        ids = from_tensor(message.prompt.token_ids)
        return cls(message.group_id, replace(prompt, text=message.prompt.text, token_ids=ids), samples)

    def train_group(self) -> trainer_pb2.TrainGroup:
        """Return its message for the trainer."""
        return trainer_pb2.TrainGroup(
            group_id=self.group_id,
            prompt_token_ids=to_tensor(_int32(self._prompt_ids())),
            samples=[sample.train_sample() for sample in self.samples],
        )

    def to_proto(self) -> pb.LoopGroup:
        """Return its message for the rewards."""
        return pb.LoopGroup(
            group_id=self.group_id,
            prompt=self.prompt.to_proto(),
            samples=[sample.to_proto() for sample in self.samples],
        )

    def sequences(self) -> list[trainer_pb2.ScoredSequence]:
        """Return its prompt with each of its responses."""
        prompt = to_tensor(_int32(self._prompt_ids()))
        return [
            trainer_pb2.ScoredSequence(
                sequence_id=sample.sample_id,
                prompt_token_ids=prompt,
                token_ids=to_tensor(_int32(sample.token_ids)),
            )
            for sample in self.samples
        ]

    def _prompt_ids(self) -> NDArray[np.int32]:
        if self.prompt.token_ids is None:
            raise InvalidRequest(
                "the prompt has no tokens",
                where=f"group {self.group_id!r}",
                next_step="take groups as `sample` returns them, or set prompt.token_ids",
            )
        return self.prompt.token_ids


def _message(given: Mapping[str, Any]) -> Message:
    calls = [
        ToolCall(
            id=one.get("id"), name=one["function"]["name"], arguments=_json(one["function"]["arguments"])
        )
        for one in given.get("tool_calls") or ()
    ]
    said, answers = given.get("content") or "", given.get("tool_call_id") or ""
    return Message(role=given["role"], content=said, tool_calls=calls, tool_call_id=answers)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _int32(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)
