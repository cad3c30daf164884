"""Train whole updates: prepare each for the ranks, and let it make one version.

To prepare an update is to check it, to score it where the objective asks for it, and to lay it out. Invariants:
preparing changes nothing in the session; an update id trains once, and a repeat gets the first result; nothing changes
before a whole valid batch has arrived; a skipped update leaves weights and version as they were. An update of several
optimizer steps is still one call and one version; it counts as made if any of its steps was made.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.errors import NotFound
from flotilla_core.version import Version
from flotilla_trainer.batch.packing import MicroBatch, fed_tokens, padding_share
from flotilla_trainer.batch.update_batch import StepPlan, UpdateBatch
from flotilla_trainer.front.idempotent_calls import IdempotentCalls
from flotilla_trainer.front.session_progress import NOTHING_COUNTS, PendingGradients, SessionProgress
from flotilla_trainer.front.session_ranks import SessionRanks
from flotilla_trainer.objective.base import SessionObjective
from flotilla_trainer.objective.pairs import RewardUpdate, after_answers
from flotilla_trainer.wire.frames import Array

KEPT_RESULTS = 64
"""The most results that are kept, because each lists its samples; a caller can only ask about these."""
ONE_STEP = StepPlan()


def score_squares(logprobs: Array, squares: Array) -> Array:
    """Return 1 - 2 p + the sum of all p^2: p is the probability of a token, the sum is over the vocabulary."""
    return 1.0 - 2.0 * np.exp(logprobs.astype(np.float64)) + squares


@dataclass(frozen=True)
class PreparedUpdate:
    """The micro-batches of an update, and its facts."""

    batch: UpdateBatch
    packed: list[list[MicroBatch]]
    facts: dict[str, float]
    """Metrics of the objective, means over the trained tokens or the pairs of the batch."""
    steps: list[int]
    """The number of micro-batches of each optimizer step; those of a step follow those of the step before."""
    counts: bool = True
    """False if no token can change a weight, because the objective left out every group."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that need no rank."""
        return self.facts | {
            "tokens/response_mean": float(self.batch.response_lengths.mean()),
            "tokens/fed": float(fed_tokens(self.packed)),
            "tokens/padding_share": padding_share(self.packed),
            "microbatches": float(len(self.packed[0])),
        }


class Preparation:
    """Prepares the updates of one session."""

    def __init__(self, seed: int, ranks: SessionRanks) -> None:
        self._seed = seed
        self._ranks = ranks

    async def of(
        self,
        update_id: str,
        groups: Sequence[pb.TrainGroup],
        version: Version,
        objective: SessionObjective,
        plan: StepPlan = ONE_STEP,
    ) -> PreparedUpdate:
        """Prepare the update of `version` on these groups, in as many steps as planned."""
        writer = version if objective.writes_samples else None
        batch = await asyncio.to_thread(UpdateBatch.read, groups, self._ranks.limits, writer)
        if objective.scores_reference(batch):
            scores = await self.scores(batch, objective, reference=True)
            batch = replace(batch, reference_logprobs=scores["logprobs"])
        policy: Array | None = None
        if objective.scores_policy(several_steps=plan.several):
            if isinstance(objective, RewardUpdate):
                policy = await self._rewards(batch)
            else:
                policy = (await self.scores(batch, objective))["logprobs"]
        if objective.scores_distributions(batch):
            scores = await self.scores(batch, objective, squares=True)
            batch = replace(batch, score_squares=score_squares(scores["logprobs"], scores["squares"]))

        def lay_out() -> PreparedUpdate:
            # The same for an update and its repetition in a later lineage: it depends on the step alone.
            seed = ids.derive_seed("shuffle", self._seed, update_id.rpartition("/")[2].rpartition(".")[2])
            sequences, facts = objective.sequences(batch, seed, policy, plan.parts(batch))
            steps = plan.steps(sequences, batch)
            packs = [self._ranks.pack(step) for step in steps or [sequences]]
            packed = [list(chain.from_iterable(of_rank)) for of_rank in zip(*packs, strict=True)]
            return PreparedUpdate(batch, packed, facts, [len(pack[0]) for pack in packs], bool(steps))

        return await asyncio.to_thread(lay_out)

    async def _rewards(self, batch: UpdateBatch) -> Array:
        """Return the reward of every answer under the current reward model."""
        sequences = after_answers(batch)
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing("scoring with the reward model"):
            scores = await self._ranks.values(packed, len(sequences.scored))
        return scores["values"]

    async def scores(
        self, batch: UpdateBatch, objective: SessionObjective, **asked: bool
    ) -> dict[str, Array]:
        """Score every response token under the current policy, or under the one that the session started from."""
        sequences = batch.all_responses()
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing(f"scoring with the {'reference' if 'reference' in asked else 'policy'}"):
            return await self._ranks.scores(
                packed, len(sequences.scored), temperature=objective.temperature, **asked
            )


class Updates:
    """The updates of one session."""

    def __init__(
        self,
        dump_dir: str,
        plan: StepPlan,
        ranks: SessionRanks,
        preparation: Preparation,
        progress: SessionProgress,
        pending: PendingGradients,
    ) -> None:
        self._dump_dir = dump_dir
        self._plan = plan
        self.ranks = ranks
        self.preparation = preparation
        self.progress = progress
        self.pending = pending
        self._results: IdempotentCalls[pb.UpdateResult] = IdempotentCalls(KEPT_RESULTS)
        self._in_progress: list[str] = []
        self.last_id = ""
        """The id of the update that was sent last; empty before the first."""

    @property
    def running(self) -> str:
        """The id of an update that is in progress; empty where none is."""
        return self._in_progress[0] if self._in_progress else ""

    async def train(self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup]) -> pb.UpdateResult:
        """Make one update on a whole batch, or return the earlier result of the same update."""
        known = self._results.get(header.update_id)
        if known is not None and known.done() and _was_another_try(known.result(), groups):
            self._results.forget(header.update_id)
        return await self._results.run(header.update_id, lambda: self._exclusively(header, groups))

    def finished(self, update_id: str) -> pb.UpdateResult | None:
        """Return the result of an update that was made; None where it was not."""
        known = self._results.get(update_id)
        if known is None or not known.done() or known.result().skipped:
            return None
        return known.result()

    async def result(self, update_id: str) -> pb.UpdateResult:
        """Wait for the result of an update that runs or is done."""
        known = self._results.get(update_id)
        if known is None:
            raise NotFound(
                f"update {update_id!r} is not known to this session",
                where=f"run {self.ranks.run_id}",
                why=f"the session is at version {self.progress.version}",
                next_step="send it with Train",
            )
        return await asyncio.shield(known)

    async def _exclusively(self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup]) -> pb.UpdateResult:
        """Train when no other work uses the weights; the update is in progress while it waits for that."""
        self._in_progress.append(header.update_id)
        self.last_id = header.update_id
        try:
            async with self.ranks.exclusive:
                return await self._train(header, groups)
        finally:
            self._in_progress.remove(header.update_id)

    async def _train(self, header: pb.TrainHeader, groups: Sequence[pb.TrainGroup]) -> pb.UpdateResult:
        progress, update_id = self.progress, header.update_id
        self.ranks.check_open()
        progress.check_usable()
        self.pending.refuse(f"update {update_id}")
        progress.check_version(Version.from_proto(header.policy_version), f"update {update_id}")
        rate = progress.learning_rate(header.learning_rate if header.HasField("learning_rate") else None)
        refuse_above = header.refuse_above if header.HasField("refuse_above") else None
        started = time.monotonic()

        async def attempt() -> tuple[PreparedUpdate, float, dict[str, Any]]:
            prepared = await self.preparation.of(
                update_id, groups, progress.version, progress.objective, self._plan
            )
            prepared_s = time.monotonic() - started
            if not prepared.counts:
                return prepared, prepared_s, {}
            fields = {"learning_rate": rate, "steps": prepared.steps, "refuse_above": refuse_above}
            with self.ranks.doing("train: forward, backward and step"):
                answers = await self.ranks.work("train", prepared.packed, fields)
            return prepared, prepared_s, answers[0].fields

        prepared, prepared_s, answer = await self.ranks.fitted(attempt)
        if not prepared.counts:
            return self._result(update_id, prepared.batch, prepared.metrics, NOTHING_COUNTS)
        metrics = answer["metrics"] | prepared.metrics | {"time/prepare_s": prepared_s}
        skipped, batch = answer["skipped"], prepared.batch
        if skipped:
            progress.skipped(update_id, skipped, lambda: self._dump(update_id, batch, skipped, metrics))
        else:
            progress.made(metrics, len(batch.sample_ids))
        return self._result(update_id, batch, metrics, skipped, answer["skipped_steps"])

    def _result(
        self,
        update_id: str,
        batch: UpdateBatch,
        metrics: dict[str, float],
        skipped: str,
        skipped_steps: Sequence[str] = (),
    ) -> pb.UpdateResult:
        return pb.UpdateResult(
            update_id=update_id,
            policy_version=self.progress.version.to_proto(),
            skipped=skipped,
            metrics=metrics,
            sample_ids=batch.sample_ids,
            skipped_steps=skipped_steps,
        )

    def _dump(self, update_id: str, batch: UpdateBatch, why: str, metrics: dict[str, float]) -> str:
        if not self._dump_dir:
            return "not kept: the session names no dump_dir"
        try:
            return str(dump_batch(Path(self._dump_dir), update_id, batch, why, metrics))
        except OSError as error:
            return f"not written: {error}"


def _was_another_try(result: pb.UpdateResult, groups: Sequence[pb.TrainGroup]) -> bool:
    """Return whether a new batch uses the id of a skipped update, whose version is still to be made."""
    samples = [sample.sample_id for group in groups for sample in group.samples]
    return bool(result.skipped) and samples != list(result.sample_ids)


def dump_batch(
    directory: Path, update_id: str, batch: UpdateBatch, why: str, metrics: dict[str, float]
) -> Path:
    """Write `<update>.npz` with the arrays and `<update>.json` with ids and metrics; return the path of the former."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / re.sub(r"[^A-Za-z0-9.-]+", "_", update_id)
    arrays: dict[str, Any] = {
        name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    path = Path(f"{stem}.npz")
    np.savez(path, **arrays)
    summary = {"update_id": update_id, "why": why, "metrics": metrics, "sample_ids": batch.sample_ids}
    Path(f"{stem}.json").write_text(json.dumps(summary, indent=1), "utf-8")
    return path
