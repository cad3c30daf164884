"""One run's use of the trainer: its objective, its version, its updates.

Invariants: the version grows by one with every step that was made and with nothing else; an update id trains once, and
a repeat gets the first result; nothing changes before a whole valid batch is here; a skipped update leaves weights and
version as they were, and too many of them in a row end the session; a session that has ended sends the ranks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from google.protobuf import json_format

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    NotFinite,
    NotFound,
    StaleVersion,
)
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch_dump import dump_batch
from flotilla_trainer.frames import Array, Frame
from flotilla_trainer.gang import Gang
from flotilla_trainer.objective.call_objective import call_objective
from flotilla_trainer.objective.settings import objective_settings
from flotilla_trainer.objective.update_objective import UpdateObjective
from flotilla_trainer.once import Once
from flotilla_trainer.packing import Layout, MicroBatch, Sequences, fed_tokens, pack, padding_share
from flotilla_trainer.pending_gradients import PendingGradients
from flotilla_trainer.schedule import learning_rate
from flotilla_trainer.session_settings import layout, rank_settings
from flotilla_trainer.update_batch import ModelLimits, UpdateBatch, read_scored

KEPT_RESULTS = 64
"""Each names its samples; only the newest can still be asked about."""

logger = structlog.get_logger()


class Session:
    """The state between OpenSession and CloseSession."""

    def __init__(
        self, request: pb.OpenSessionRequest, folder: Path, gang: Gang, activities: Activities
    ) -> None:
        self.run_id = request.run_id
        self.folder = folder
        self.version = Version(request.lineage, 0)
        self._spec = request.spec
        self._gang = gang
        self._activities = activities
        self._objective = UpdateObjective(request.spec.objective)
        self._updates: Once[pb.UpdateResult] = Once(KEPT_RESULTS)
        self._attempts: dict[str, str] = {}
        self._pending = PendingGradients(request.run_id)
        self._turn = asyncio.Lock()
        self._skipped_in_row = 0
        self._failure: FlotillaError | None = None
        self._over: FlotillaError | None = None

    async def open(self) -> None:
        """Build the optimizer on the ranks."""
        packed, refusal = self._layout().packed, self._gang.facts["packing_refusal"]
        logger.info("session opens", run_id=self.run_id, packed=packed, packing_refusal=refusal)
        await self._gang.command("open_session", rank_settings(self._spec))

    def end(self, why: FlotillaError) -> None:
        """Let nothing of this session reach the ranks any more; what they do already comes to its end."""
        self._over = self._over or why

    def check_open(self) -> None:
        """Refuse work for a session that has ended."""
        if self._over is not None:
            raise self._over

    async def settled(self) -> None:
        """Wait until nothing of this session is under way."""
        limit_s = self._gang.slow_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._turn:
                return
        except TimeoutError:
            raise DeadlineExceeded(
                "the session cannot be closed",
                where=f"run {self.run_id}",
                why=f"waited {limit_s:g} s for its last command; " + "; ".join(self._gang.phases()),
                next_step="close it again; a rank that hangs is named and replaced by itself",
            ) from None

    async def train(self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup]) -> pb.UpdateResult:
        """One update on a whole batch, or the result of the same update earlier."""
        known = self._updates.get(header.update_id)
        if known is not None and known.done() and self._was_another_try(known.result(), groups):
            self._updates.forget(header.update_id)
        return await self._updates.run(header.update_id, lambda: self._attempt(header, groups))

    def finished(self, update_id: str) -> pb.UpdateResult | None:
        """The result of an update that was made."""
        known = self._updates.get(update_id)
        if known is None or not known.done() or known.result().skipped:
            return None
        return known.result()

    async def update(self, update_id: str) -> pb.UpdateResult:
        """The result of an update that runs or is done."""
        known = self._updates.get(update_id)
        if known is None:
            raise NotFound(
                f"update {update_id!r} never happened here",
                where=f"run {self.run_id}",
                why=f"the session is at version {self.version}",
                next_step="send it with Train",
            )
        return await asyncio.shield(known)

    async def abort(self, update_id: str) -> None:
        """Give up an update that runs; when this returns it has ended one way or the other."""
        running = self._updates.get(update_id)
        if running is None or running.done() or update_id not in self._attempts:
            return
        await self._gang.urgently("abort_update", {"attempt": self._attempts[update_id]})
        await asyncio.wait({running})

    async def forward_backward(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        """Add the gradients of a batch to those that wait for their step."""
        return await self._pending.once(
            request.request_id or ids.new_request_id(), lambda: self._add_gradients(request)
        )

    async def optim_step(self, rate: float) -> pb.OptimStepResponse:
        """One step on the gradients that wait; without a rate, on that of the schedule."""
        if not (math.isfinite(rate) and rate >= 0):
            raise InvalidRequest(f"the learning rate is {rate}", where="learning_rate")
        async with self._turn:
            self._check_usable()
            self._pending.require()
            rate = rate or learning_rate(self._spec.optimizer, self._spec.total_updates, self.version.step)
            fields = {"learning_rate": rate, "units": self._pending.units}
            facts, sample_ids = self._pending.facts(), self._pending.sample_ids
            # The ranks give the gradients up, whatever comes of the step.
            self._pending.clear(forget=False)
            with self._activities.doing("optimizer step", run_id=self.run_id):
                answers = await self._command("optim_step", fields)
            answer = answers[0].fields
            metrics, skipped = answer["metrics"] | facts, answer["skipped"]
            self._account(f"step from {self.version}", len(sample_ids), skipped, metrics, lambda: "not kept")
            return pb.OptimStepResponse(
                policy_version=self.version.to_proto(),
                metrics=metrics,
                skipped=skipped,
                sample_ids=sample_ids,
            )

    @contextlib.asynccontextmanager
    async def holding(self, version: Version, what: str) -> AsyncIterator[None]:
        """Keep the weights at `version` meanwhile: no update runs, and one that ran before has been counted."""
        async with self._turn:
            self.check_open()
            self.check_version(version, what)
            yield

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says about this session, beside the numbers of its ranks."""
        return {
            "run_id": self.run_id,
            "policy_version": list(self.version),
            "skipped_in_row": self._skipped_in_row,
            "kl_coefficient": self._objective.kl_coefficient,
            "specification": json_format.MessageToDict(self._spec, preserving_proto_field_name=True),
        }

    def go_on_from(self, facts: dict[str, Any]) -> None:
        """The ranks hold a checkpoint with these facts now: this session's lineage goes on at its step."""
        _, step = facts["policy_version"]
        self.version = Version(self.version.lineage, step)
        self._skipped_in_row = facts["skipped_in_row"]
        self._objective.kl_coefficient = facts["kl_coefficient"]
        self._pending.clear(forget=True)

    async def evaluate(self, groups: Sequence[pb.TrainGroup]) -> pb.EvaluateLossResponse:
        """The loss of a batch; nothing changes."""
        async with self._turn:
            version = self.version
            _, packed, _ = await self._prepare("evaluate", groups)
            with self._activities.doing("evaluating the loss", run_id=self.run_id):
                answers = await self._on_ranks("evaluate", packed, {})
        metrics: dict[str, float] = answers[0].fields["metrics"]
        return pb.EvaluateLossResponse(policy_version=version.to_proto(), metrics=metrics)

    async def logprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        """Log-probabilities under the current policy, in the order of the request."""
        sequence_ids, sequences, lengths = read_scored(request.sequences, self._limits())
        packed = self._pack(sequences)
        fields = {
            "temperature": request.temperature or 1.0,
            "chunk_tokens": self._spec.batching.logprob_chunk_tokens,
            "top_k": min(request.top_k, self._limits().vocabulary),
        }
        async with self._turn:
            version = self.version
            with self._activities.doing("computing log-probabilities", run_id=self.run_id):
                answers = await self._on_ranks("score", packed, fields)
        scores = _in_place(answers, packed, len(sequences.scored))
        reply = pb.ComputeLogprobsResponse(policy_version=version.to_proto())
        edges = [0, *lengths.cumsum().tolist()]
        for index, sequence_id in enumerate(sequence_ids):
            part = slice(edges[index], edges[index + 1])
            item = reply.sequences.add(sequence_id=sequence_id, logprobs=to_tensor(scores["logprobs"][part]))
            if request.top_k:
                item.top_token_ids.CopyFrom(to_tensor(scores["top_ids"][part]))
                item.top_logprobs.CopyFrom(to_tensor(scores["top_logprobs"][part]))
        return reply

    def check_version(self, version: Version, what: str) -> None:
        """Refuse work for another version than the one that is held."""
        if version != self.version:
            raise StaleVersion(
                f"{what} is for version {version}",
                where=f"run {self.run_id}",
                why=f"the trainer holds version {self.version}",
                next_step="ask GetUpdate which updates were made",
            )

    async def _attempt(self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup]) -> pb.UpdateResult:
        """One try at an update, under a name that an abort can mean without hitting the next try."""
        attempt = self._attempts[header.update_id] = ids.new_request_id()
        try:
            return await self._train(header, groups, attempt)
        finally:
            del self._attempts[header.update_id]

    async def _train(
        self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup], attempt: str
    ) -> pb.UpdateResult:
        async with self._turn:
            self._check_usable()
            self._pending.refuse(f"update {header.update_id}")
            self.check_version(Version.from_proto(header.policy_version), f"update {header.update_id}")
            started = time.monotonic()
            batch, packed, facts = await self._prepare(header.update_id, groups)
            prepared_s = time.monotonic() - started
            rate = learning_rate(self._spec.optimizer, self._spec.total_updates, self.version.step)
            with self._activities.doing("train: forward, backward and step", run_id=self.run_id):
                answers = await self._on_ranks("train", packed, {"attempt": attempt, "learning_rate": rate})
            answer = answers[0].fields
            if answer["aborted"]:
                raise Cancelled(f"update {header.update_id} was aborted before its step")
            metrics = (
                answer["metrics"] | facts | _batch_metrics(batch, packed) | {"time/prepare_s": prepared_s}
            )
            skipped = answer["skipped"]
            self._account(
                header.update_id,
                len(batch.sample_ids),
                skipped,
                metrics,
                lambda: self._dump(header.update_id, batch, skipped, metrics),
            )
            return pb.UpdateResult(
                update_id=header.update_id,
                policy_version=self.version.to_proto(),
                skipped=skipped,
                metrics=metrics,
                sample_ids=batch.sample_ids,
            )

    async def _add_gradients(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        if self._attempts:
            raise FailedPrecondition(
                "gradients cannot be added now",
                where=f"run {self.run_id}",
                why=f"update {next(iter(self._attempts))} is under way",
                next_step="wait for its result: Train and ForwardBackward take turns",
            )
        async with self._turn:
            self._check_usable()
            asked = self._spec.objective
            if request.HasField("loss"):
                asked = call_objective(asked, request.loss)
            objective = UpdateObjective(asked)
            objective.kl_coefficient = self._objective.kl_coefficient
            self._pending.check_kind(objective.unit)
            batch, packed, facts = await self._prepare(self._call_name(), request.groups, objective)
            units = objective.units(batch)
            fields = {"objective": asdict(objective_settings(asked)), "units": units}
            try:
                with self._activities.doing("forward and backward", run_id=self.run_id):
                    answers = await self._on_ranks("forward_backward", packed, fields)
            except FlotillaError:
                self._pending.clear(forget=True)
                raise
            metrics: dict[str, float] = answers[0].fields["metrics"]
            self._pending.add(objective.unit, units, batch.sample_ids, metrics["tokens/trained"], facts)
            return pb.ForwardBackwardResponse(
                metrics=metrics | facts | _batch_metrics(batch, packed),
                policy_version=self.version.to_proto(),
            )

    def _call_name(self) -> str:
        """The first call of a step draws what the update of that step would draw."""
        update_id = ids.update_id(self.run_id, Version(self.version.lineage, self.version.step + 1))
        return update_id + (f"-{self._pending.calls}" if self._pending.calls else "")

    def _check_usable(self) -> None:
        self.check_open()
        if self._failure is not None:
            raise self._failure

    def _account(
        self, update_id: str, samples: int, skipped: str, metrics: dict[str, float], dump: Callable[[], str]
    ) -> None:
        """Move the version on, or count the skip and `dump` what led to it."""
        if not skipped:
            self.version = Version(self.version.lineage, self.version.step + 1)
            self._skipped_in_row = 0
            self._objective.adapt(metrics, samples)
            return
        self._skipped_in_row += 1
        dumped = dump()
        logger.warning(
            "update skipped", update_id=update_id, why=skipped, in_row=self._skipped_in_row, dump=dumped
        )
        if self._skipped_in_row >= max(1, self._spec.max_skipped_updates):
            self._failure = NotFinite(
                f"{self._skipped_in_row} updates in a row were skipped",
                where=f"run {self.run_id}, update {update_id}",
                why=skipped,
                next_step=f"look at the dumped batch ({dumped}); lower optimizer.learning_rate",
            )
            raise self._failure

    def _dump(self, update_id: str, batch: UpdateBatch, why: str, metrics: dict[str, float]) -> str:
        if not self._spec.dump_dir:
            return "not kept: the session names no dump_dir"
        try:
            return str(dump_batch(Path(self._spec.dump_dir), update_id, batch, why, metrics))
        except OSError as error:
            return f"not written: {error}"

    async def _prepare(
        self, update_id: str, groups: Sequence[pb.TrainGroup], objective: UpdateObjective | None = None
    ) -> tuple[UpdateBatch, list[list[MicroBatch]], dict[str, float]]:
        """The batch, laid out for the ranks, and its own metrics; by the session's objective or another one."""
        objective = objective or self._objective
        batch = await asyncio.to_thread(UpdateBatch.read, groups, self._limits(), self.version)
        reference = await self._reference_logprobs(batch) if objective.needs_reference else None

        def lay_out() -> tuple[list[list[MicroBatch]], dict[str, float]]:
            sequences, metrics = objective.sequences(batch, self._shuffle_seed(update_id), reference)
            return self._pack(sequences), metrics

        return batch, *await asyncio.to_thread(lay_out)

    async def _reference_logprobs(self, batch: UpdateBatch) -> Array:
        """Of every response token, under the policy that the session started from."""
        sequences = batch.all_responses()
        packed = await asyncio.to_thread(self._pack, sequences)
        fields = {
            "temperature": self._objective.temperature,
            "chunk_tokens": self._spec.batching.logprob_chunk_tokens,
            "top_k": 0,
            "reference": True,
        }
        with self._activities.doing("scoring with the reference", run_id=self.run_id):
            answers = await self._on_ranks("score", packed, fields)
        return _in_place(answers, packed, len(sequences.scored))["logprobs"]

    def _shuffle_seed(self, update_id: str) -> int:
        """The same for an update and its repetition in a later lineage: run/lineage.step counts by its step."""
        return ids.derive_seed("shuffle", self._spec.seed, update_id.rpartition("/")[2].rpartition(".")[2])

    def _pack(self, sequences: Sequences) -> list[list[MicroBatch]]:
        return pack(sequences, self._layout())

    def _layout(self) -> Layout:
        return layout(self._spec.batching, self._gang.facts, self._gang.size)

    async def _on_ranks(
        self, kind: str, packed: list[list[MicroBatch]], fields: dict[str, Any]
    ) -> list[Frame]:
        return await self._command(
            kind,
            fields,
            [_arrays(batches) for batches in packed],
            per_rank=[{"idle": [batch.idle for batch in batches]} for batches in packed],
        )

    async def _command(self, kind: str, *arguments: Any, **options: Any) -> list[Frame]:
        # Checked here and not where the work began: a batch takes a while to prepare, and the next session's
        # commands must find none of ours behind them.
        self.check_open()
        return await self._gang.command(kind, *arguments, **options)

    def _limits(self) -> ModelLimits:
        facts = self._gang.facts
        return ModelLimits(facts["vocabulary"], facts["max_sequence_tokens"])

    @staticmethod
    def _was_another_try(result: pb.UpdateResult, groups: Sequence[pb.TrainGroup]) -> bool:
        """A skipped update leaves its version, and so its id, to the next batch."""
        samples = [sample.sample_id for group in groups for sample in group.samples]
        return bool(result.skipped) and samples != list(result.sample_ids)


def _arrays(batches: list[MicroBatch]) -> dict[str, Array]:
    return {name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()}


def _in_place(answers: list[Frame], packed: list[list[MicroBatch]], count: int) -> dict[str, Array]:
    """The ranks' scores in the order of the scored tokens."""
    result: dict[str, Array] = {}
    for answer, batches in zip(answers, packed, strict=True):
        places = np.concatenate([batch.places for batch in batches])
        for name, values in answer.arrays.items():
            whole = result.setdefault(name, np.empty((count, *values.shape[1:]), values.dtype))
            whole[places] = values
    return result


def _batch_metrics(batch: UpdateBatch, packed: list[list[MicroBatch]]) -> dict[str, float]:
    return {
        "tokens/response_mean": float(batch.response_lengths.mean()),
        "tokens/fed": float(fed_tokens(packed)),
        "tokens/padding_share": padding_share(packed),
        "microbatches": float(len(packed[0])),
    }
