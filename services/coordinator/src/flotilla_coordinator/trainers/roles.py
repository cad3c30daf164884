"""Calls the gangs of a run in their roles: the policy, the critic, the reference, the teachers and the reward models.

Invariants: all samples of a batch get the values of one critic, which has not learned from them yet. A reference or a
teacher scores each token of a batch by its starting weights, which never change; so nothing of it is saved, and a
session that is opened again gives the same scores. Teachers are called at the same time, each with its own samples
alone. The mean of several teachers is computed in float64 from their answers, and rounded once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup
from flotilla_coordinator.trainers.messages import fill, in_parts, scored_parts
from flotilla_coordinator.trainers.session import (
    COORDINATOR,
    SESSION_TIMEOUT_S,
    TRAIN_TIMEOUT_S,
    Gang,
    GangSession,
    LearningSession,
)
from flotilla_core import ids, rpc
from flotilla_core.agreement import DECIDING_TOKENS, SECOND_LOOK, AgreementLimits, Rounding
from flotilla_core.config.training import TOP_BYTES, AskedTeachers
from flotilla_core.errors import FailedPrecondition, Mismatch
from flotilla_core.roles import TEACHER, kind_of_role, name_of_role
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

T = TypeVar("T")

Ask = Callable[[list[pb.ScoredSequence]], Awaitable[dict[str, T]]]


class PolicyTrainer(LearningSession):
    """The session of the model that the run trains."""

    agreement = AgreementLimits(None, None)
    """The limits for rollouts that differ from it; off for an objective that learns from no rollouts."""
    measured: Callable[[Rounding], None] | None = None
    """Sets the limits by what rounding was measured to explain; None where no limit goes by that."""
    temperature = 1.0
    """The temperature of the rollouts."""

    async def train(self, batch: Batch) -> pb.UpdateResult:
        """Make one optimizer update on the whole batch.

        A batch that differs too much is tried again where rounding explains more on its own tokens than it did on those
        of the last check: other tokens round by several times as much.
        """
        try:
            return await super().train(batch)
        except Mismatch:
            before, tokens = self.agreement.fail_at, sum(sample.token_ids.size for sample in batch.samples)
            if before is None or self.measured is None or tokens < DECIDING_TOKENS:
                raise
            self.measured(await self._rounding_of(batch))
            if self.agreement.fail_at is None or self.agreement.fail_at <= before:
                raise
        return await super().train(batch)

    async def _rounding_of(self, batch: Batch) -> Rounding:
        """Measure what rounding does to the first groups of a batch that have the tokens to decide."""
        groups: list[RolloutGroup] = []
        tokens = 0
        for group in batch.groups:
            if tokens >= SECOND_LOOK * DECIDING_TOKENS:
                break
            groups.append(group)
            tokens += sum(sample.token_ids.size for sample in group.samples)
        part = replace(batch, groups=groups)
        ours, exact = [
            await batch_logprobs(self.stub, self._run_id, part, self.temperature, in_float32=in_float32)
            for in_float32 in (False, True)
        ]
        of_samples = [sample.sample_id for sample in part.samples]
        return Rounding.of(
            np.concatenate([ours[each] for each in of_samples]),
            np.concatenate([exact[each] for each in of_samples]),
        )

    def _header(self, update_id: str, batch: Batch) -> pb.TrainHeader:
        header = super()._header(update_id, batch)
        if self.agreement.fail_at is not None:
            header.refuse_above = self.agreement.fail_at
        return header

    async def logprobs(
        self, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float, *, in_float32: bool = False
    ) -> tuple[Version, list[np.ndarray]]:
        """Return the log-probabilities of (prompt, response) pairs under the current policy."""
        request = pb.ComputeLogprobsRequest(
            run_id=self._run_id, temperature=temperature, in_float32=in_float32
        )
        for index, (prompt, response) in enumerate(sequences):
            request.sequences.add(
                sequence_id=str(index), prompt_token_ids=to_tensor(prompt), token_ids=to_tensor(response)
            )
        reply = await rpc.unary(self.stub.ComputeLogprobs, request, timeout_s=SESSION_TIMEOUT_S)
        by_id = {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}
        return Version.from_proto(reply.policy_version), [by_id[str(i)] for i in range(len(sequences))]

    async def score_by_start(self, batch: Batch, temperature: float) -> None:
        """Set the log-probabilities of every sample under the copy of the first policy."""
        found = await batch_logprobs(self.stub, self._run_id, batch, temperature, of_start=True)
        for sample in batch.samples:
            sample.reference_logprobs = found[sample.sample_id]

    async def evaluate_loss(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return the metrics of the objective on groups that are not trained."""
        request = pb.EvaluateLossRequest(run_id=self._run_id)
        for group in groups:
            fill(request.groups.add(), group)
        reply = await rpc.unary(self.stub.EvaluateLoss, request, timeout_s=TRAIN_TIMEOUT_S)
        return dict(reply.metrics)

    async def export(self, path: Path, dtype: str = "auto") -> None:
        """Write the current policy as a Hugging Face folder, with its weights in a type of `export_dtype`."""
        call = rpc.unary(
            self.stub.ExportModel,
            pb.ExportModelRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                path=str(path),
                policy_version=self.version.to_proto(),
                dtype="" if dtype == "auto" else dtype,
            ),
            timeout_s=rpc.UNLIMITED_S,
        )
        reply = await self._in_patience(call, self._close_timeout_s + SESSION_TIMEOUT_S)
        if not reply.HasField("folder"):
            return
        if path.exists() and not (path / "config.json").is_file():
            raise FailedPrecondition("the export would replace what is no model", where=f"path {path}")
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        tell = partial(self.gang.tell, COORDINATOR)
        try:
            await self.gang.files.fetch_into(reply.folder, path, self._run_id, tell=tell)
        finally:
            tell("")


class Critic(LearningSession):
    """The session of a run's value model, which predicts the return at each token and learns from the actual one."""

    async def value(self, batch: Batch) -> None:
        """Set the values of every sample: the critic's prediction before each of its tokens, and after the last."""
        values = await batch_values(self.stub, self._run_id, batch)
        for sample in batch.samples:
            expected = values[sample.sample_id]
            sample.values, sample.value_after = expected[:-1], float(expected[-1])


class ScoringSession(GangSession):
    """The session of a model that does not learn: a reference or a teacher.

    It scores batches at the temperature of the rollouts.
    """

    def __init__(
        self,
        run_id: str,
        spec: session_pb2.SessionSpec,
        gang: Gang,
        known_runs: Callable[[], Awaitable[list[str]]],
        lineage: int,
        temperature: float,
        top_k: int = 0,
    ) -> None:
        super().__init__(run_id, spec, gang, known_runs, lineage)
        self._temperature = temperature
        self._top_k = top_k

    async def logprobs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return this model's log-probabilities of the tokens of the batch, by sample id."""
        return await batch_logprobs(self.stub, self._run_id, batch, self._temperature)

    async def score(self, batch: Batch) -> None:
        """Set this model's log-probabilities of the tokens of every sample.

        A teacher with a `top_k` also sets the tokens that it finds likeliest in each place.
        """
        if self._top_k:
            await self._score_likeliest(batch)
            return
        found = await self.logprobs(batch)
        for sample in batch.samples:
            if kind_of_role(self.gang.role) == TEACHER:
                sample.teacher_logprobs = found[sample.sample_id]
            else:
                sample.reference_logprobs = found[sample.sample_id]

    async def _score_likeliest(self, batch: Batch) -> None:
        found = await batch_likeliest_tokens(self.stub, self._run_id, batch, self._temperature, self._top_k)
        for sample in batch.samples:
            said = found[sample.sample_id]
            sample.teacher_logprobs = said.logprobs
            sample.teacher_top_token_ids, sample.teacher_top_logprobs = said.top_token_ids, said.top_logprobs


class RewardModelSession(GangSession):
    """The session of a model that gives rewards, which does not learn; it reads tokens of its own tokenizer."""

    async def scores(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the scores after the last token of each text, one for each label."""
        sequences = [
            pb.ScoredSequence(sequence_id=str(number), prompt_token_ids=to_tensor(tokens))
            for number, tokens in enumerate(texts)
        ]
        found: dict[str, np.ndarray] = {}
        for part in in_parts(sequences):
            request = pb.ComputeValuesRequest(run_id=self._run_id, sequences=part, after_last=True)
            reply = await rpc.unary(self.stub.ComputeValues, request, timeout_s=TRAIN_TIMEOUT_S)
            found |= {item.sequence_id: from_tensor(item.values) for item in reply.sequences}
        return [found[str(number)] for number in range(len(texts))]


class Teachers:
    """The sessions of a run's teachers, one or several."""

    def __init__(self, asked: AskedTeachers, sessions: Sequence[ScoringSession]) -> None:
        self._asked = asked
        self._sessions = {session.gang.role: session for session in sessions}

    async def score(self, batch: Batch) -> None:
        """Set its teacher's log-probabilities of every sample's tokens, or the weighted mean of all teachers'."""
        parts, seconds = parts_of(self._asked, batch), batch.metrics
        if self._asked.averages_teachers:
            calls = [self._timed(role, self._sessions[role].logprobs(batch), seconds) for role in parts]
            found = dict(zip(parts, await gather_or_cancel(calls), strict=True))
            for sample in batch.samples:
                said = {role: logprobs[sample.sample_id] for role, logprobs in found.items()}
                sample.teacher_logprobs = mean_logprobs(said, self._asked.teacher_shares)
            return
        await gather_or_cancel(
            self._timed(role, self._sessions[role].score(part), seconds) for role, part in parts.items()
        )

    @staticmethod
    async def _timed(role: str, answer: Awaitable[T], seconds: dict[str, float]) -> T:
        """Await the answer, and record the time of a named teacher as a metric."""
        started = time.monotonic()
        found = await answer
        if name := name_of_role(role):
            seconds[f"time/teacher_{name}_s"] = time.monotonic() - started
        return found


def parts_of(asked: AskedTeachers, batch: Batch) -> dict[str, Batch]:
    """Return the groups that each teacher scores, by its role; a teacher without groups has no part."""
    roles = asked.teacher_shares
    if asked.teacher_field is None:
        return dict.fromkeys(roles, batch)
    own = {role: [group for group in batch.groups if group.teacher == role] for role in roles}
    return {role: replace(batch, groups=groups) for role, groups in own.items() if groups}


def mean_logprobs(said: Mapping[str, np.ndarray], shares: Mapping[str, float]) -> np.ndarray:
    """Return the weighted mean of the teachers' log-probabilities of each token.

    This is the log-probability under their normalised geometric mean, less a number that is the same for all tokens in
    a place, so that it changes no gradient on average.
    """
    mean = sum(shares[role] * logprobs.astype(np.float64) for role, logprobs in said.items())
    return np.asarray(mean, np.float32)


class LikeliestTokens(NamedTuple):
    """A model's log-probabilities of the tokens of one sample, and of the likeliest tokens in their places."""

    logprobs: np.ndarray
    top_token_ids: np.ndarray
    """The shape is [tokens, k]."""
    top_logprobs: np.ndarray
    """The shape is [tokens, k]."""


async def batch_logprobs(
    stub: TrainerServiceAsyncStub,
    run_id: str,
    batch: Batch,
    temperature: float,
    *,
    of_start: bool = False,
    in_float32: bool = False,
) -> dict[str, np.ndarray]:
    """Return the log-probabilities of the samples' tokens, under the session's weights or its starting weights."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, np.ndarray]:
        request = pb.ComputeLogprobsRequest(
            run_id=run_id,
            temperature=temperature,
            reference=of_start,
            in_float32=in_float32,
            sequences=sequences,
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}

    return await _by_sample(batch, ask)


async def batch_likeliest_tokens(
    stub: TrainerServiceAsyncStub, run_id: str, batch: Batch, temperature: float, top_k: int
) -> dict[str, LikeliestTokens]:
    """Return the log-probabilities of the tokens, and in the place of each the `top_k` likeliest tokens."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, LikeliestTokens]:
        request = pb.ComputeLogprobsRequest(
            run_id=run_id, temperature=temperature, top_k=top_k, sequences=sequences
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        return {
            item.sequence_id: LikeliestTokens(
                from_tensor(item.logprobs),
                from_tensor(item.top_token_ids),
                from_tensor(item.top_logprobs),
            )
            for item in reply.sequences
        }

    return await _by_sample(batch, ask, top_k * TOP_BYTES)


async def batch_values(stub: TrainerServiceAsyncStub, run_id: str, batch: Batch) -> dict[str, np.ndarray]:
    """Return the critic's values before each token of a sample and, as the last number, after all of them."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, np.ndarray]:
        request = pb.ComputeValuesRequest(run_id=run_id, sequences=sequences, after_last=True)
        reply = await rpc.unary(stub.ComputeValues, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: from_tensor(item.values) for item in reply.sequences}

    return await _by_sample(batch, ask)


async def _by_sample(batch: Batch, ask: Ask[T], answer_bytes: int = 4) -> dict[str, T]:
    found: dict[str, T] = {}
    for sequences in scored_parts(batch.groups, answer_bytes):
        found |= await ask(sequences)
    return found
