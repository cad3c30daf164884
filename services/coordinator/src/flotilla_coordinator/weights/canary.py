"""Checks each sync live: trainer and generator must agree on the same tokens.

Invariants: canary samples never reach the ledger or the trainer's updates. Every member that serves the version answers
every prompt, or is reported as failed; so is one whose mean probability difference over all of its answers is above
`fail_at`, with a mismatch. A mismatch ends the run, because later samples could not be attributed to the weights that
they name. The mean of one short answer would judge by chance: rounding alone moves it by half of itself. The check
compares with the trainer's present weights, so no update may begin before it has ended. The cost of each sync is
recorded as metrics as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_coordinator.rollouts.generation import CANARY
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.weights.members import Member, SyncReport
from flotilla_core import ids, rpc
from flotilla_core.config import CanaryConfig
from flotilla_core.errors import FlotillaError, Mismatch, Unavailable
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version


@dataclass(frozen=True)
class CanaryReport:
    """The differences over all canary tokens of all members."""

    probs_mean: float
    logprob_mean: float
    logprob_max: float
    tokens: int


@dataclass
class CanaryOutcome:
    """The result of a canary; `report` is None when the canary is off or no member could answer."""

    report: CanaryReport | None = None
    failures: dict[str, FlotillaError] = field(default_factory=dict)
    """Why a member did not pass: a mismatch where it decodes with other weights, else what kept it from answering."""

    @property
    def mismatch(self) -> Mismatch | None:
        """Return the first mismatch of a member."""
        return next((error for error in self.failures.values() if isinstance(error, Mismatch)), None)


@dataclass(frozen=True)
class _Response:
    member: str
    prompt: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


class Canary:
    """A fixed set of prompts that every version answers first."""

    def __init__(
        self,
        run_id: str,
        config: CanaryConfig,
        fail_at: float | None,
        policy: PolicyTrainer,
        prompts: list[np.ndarray],
        timeout_s: float,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._fail_at = fail_at
        self._policy = policy
        self._prompts = prompts
        self._timeout_s = timeout_s

    async def check(self, version: Version, members: Sequence[Member]) -> CanaryOutcome:
        """Compare the probabilities; the outcome names the members that cannot answer or answer with other weights."""
        outcome = CanaryOutcome()
        probs, differences = [], []
        for temperature in self._config.temperatures if self._prompts else ():
            answering = [member for member in members if member.name not in outcome.failures]
            responses = await self._responses(version, answering, temperature, outcome.failures)
            if not responses:
                continue
            _, expected = await self._policy.logprobs(
                [(r.prompt, r.token_ids) for r in responses], temperature
            )
            by_member: dict[str, list[np.ndarray]] = {}
            for response, reference in zip(responses, expected, strict=True):
                difference = np.abs(np.exp(response.logprobs) - np.exp(reference))
                by_member.setdefault(response.member, []).append(difference)
                differences.append(np.abs(response.logprobs - reference))
            for name, of_answers in by_member.items():
                pooled = np.concatenate(of_answers)
                # The condition is written so that a difference that is not a number fails as well.
                if self._fail_at is not None and not pooled.mean() <= self._fail_at:
                    outcome.failures[name] = self._mismatch(version, name, float(pooled.mean()))
                probs.append(pooled)
        if differences:
            flat = np.concatenate(differences)
            outcome.report = CanaryReport(
                float(np.concatenate(probs).mean()), float(flat.mean()), float(flat.max()), int(flat.size)
            )
        return outcome

    def _mismatch(self, version: Version, member: str, difference: float) -> Mismatch:
        return Mismatch(
            f"the token probabilities of {member} differ from the trainer's by {difference:.4f}",
            where=f"run {self._run_id}, version {version}",
            why="it received the trainer's weights (the digests match), but the mean difference over its answers is "
            f"above weights.canary.fail_at = {self._fail_at}",
            next_step=f"restart {member} and resume the run; if it differs again, its engine computes another model "
            "than the trainer: compare both with float32, or set weights.canary.fail_at above a difference that you "
            "accept",
        )

    async def _responses(
        self,
        version: Version,
        members: Sequence[Member],
        temperature: float,
        failures: dict[str, FlotillaError],
    ) -> list[_Response]:
        """Return the answers of all members that gave every one; the others are added to `failures`."""
        answers = await asyncio.gather(*(self._answers_of(m, version, temperature) for m in members))
        responses: list[_Response] = []
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, FlotillaError):
                failures[member.name] = answer
            else:
                responses += answer
        return responses

    async def _answers_of(
        self, member: Member, version: Version, temperature: float
    ) -> list[_Response] | FlotillaError:
        try:
            return await gather_or_cancel(
                self._generate(member, prompt, index, version, temperature)
                for index, prompt in enumerate(self._prompts)
            )
        except FlotillaError as error:
            return error

    async def _generate(
        self, member: Member, prompt: np.ndarray, index: int, version: Version, temperature: float
    ) -> _Response:
        sample_id = f"{self._run_id}/canary/{version}/{index}"
        request = pb.GenerateRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            prompt_token_ids=to_tensor(prompt),
            samples=[pb.SampleSlot(sample_id=sample_id, seed=ids.derive_seed(sample_id))],
            sampling=pb.SamplingParams(
                temperature=temperature, max_tokens=self._config.tokens, ignore_eos=True
            ),
            min_version=version.to_proto(),
            priority=CANARY,
        )
        stream = rpc.server_stream(
            member.replica.stub.Generate, request, idle_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        async with aclosing(stream) as replies:
            async for reply in replies:
                (sample,) = reply.samples
                if sample.finish_reason == pb.FINISH_REASON_ABORT:
                    raise Unavailable(f"{member.name} gave a canary up")
                logprobs = from_tensor(sample.logprobs).astype(np.float64)
                return _Response(member.name, prompt, from_tensor(sample.token_ids), logprobs)
        raise Unavailable(f"{member.name} ended a canary without a sample")


class LiveCheck:
    """Records the cost of each sync of a run as metrics, then compares trainer and generators on the same tokens.

    The comparison may end in a later step than the sync, so `figures` keeps what the last one found. It calls `warn`
    with a difference beyond `warn_at`.
    """

    def __init__(
        self,
        canary: Canary,
        metrics: dict[str, float],
        figures: dict[str, float],
        warn_at: float | None,
        warn: Callable[[str], None],
    ) -> None:
        self._canary = canary
        self._metrics = metrics
        self._figures = figures
        self._warn_at = warn_at
        self._warn = warn

    async def verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        """Return the members that could not answer, with the reasons; raise the mismatch of one with other weights."""
        self._note_cost(report)
        started = time.monotonic()
        outcome = await self._canary.check(report.version, report.members)
        if (mismatch := outcome.mismatch) is not None:
            raise mismatch
        result = outcome.report
        if result is None:
            return outcome.failures
        self._figures |= {
            "canary/mean": result.probs_mean,
            "canary/logprob_mean": result.logprob_mean,
            "canary/max": result.logprob_max,
            "time/canary_s": time.monotonic() - started,
        }
        if self._warn_at is not None and result.probs_mean > self._warn_at:
            self._warn(
                f"trainer and generator differ: mean probability difference {result.probs_mean:.4f} "
                f"at version {report.version} (weights.canary.warn_at)"
            )
        return outcome.failures

    def _note_cost(self, report: SyncReport) -> None:
        metrics = self._metrics
        if report.caught_up:
            metrics["sync/caught_up"] = metrics.get("sync/caught_up", 0.0) + len(report.members)
            return
        metrics["sync/bytes"] = float(report.bytes)
        metrics["sync/stage_s"] = report.stage_s
        metrics["sync/stall_s"] = report.stall_s
        metrics["sync/members"] = float(len(report.members))
        metrics["sync/epochs"] = float(report.epochs)
