"""Checks each sync live: trainer and generator must agree on the same tokens.

Invariants: canary samples never reach the ledger or the trainer's updates. Every member that serves the version answers
every prompt, or is reported as failed; so is one whose mean probability difference over all of its answers is above
what rounding explains, with a mismatch: its later samples could not be attributed to the weights that they name. It
gets no more work, and where no member is left that agrees, the run ends. The check compares with the trainer's present
weights, so no update may begin before it has ended.

The mean of a short answer judges by chance: rounding alone moves it by half of itself and more. So a member that is
above the limit answers again, several times as much, and is named only where the mean over all of its answers is above
the limit of a check of the default size. What rounding explains is measured in the first check of a run, over no fewer
tokens than the default, and again before a member is named: a policy that has moved may round more than at first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_coordinator.rollouts.generation import CANARY
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.weights.members import Member, SyncReport
from flotilla_core import ids, rpc
from flotilla_core.agreement import (
    DECIDING_TOKENS,
    SECOND_LOOK,
    AgreementLimits,
    Rounding,
    check_limits,
)
from flotilla_core.config import CanaryConfig, StackConfig
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
    warn_at: float | None
    """The limit that none of the members should be above."""


@dataclass
class CanaryOutcome:
    """The result of a canary; `report` is None when the canary is off or no member could answer."""

    report: CanaryReport | None = None
    failures: dict[str, FlotillaError] = field(default_factory=dict)
    """The failure of each member: a mismatch where it decodes with other weights, else what kept it from answering."""


@dataclass(frozen=True)
class CanaryAnswer:
    """The answer of a member to one prompt."""

    member: str
    prompt: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


class Judgement(NamedTuple):
    """The differences of all answers at one temperature, by member, and their limits."""

    probs: dict[str, np.ndarray]
    logprobs: dict[str, np.ndarray]
    limits: AgreementLimits

    @property
    def above(self) -> set[str]:
        """The members whose mean difference is above the limit at which one is named."""
        return {name for name, difference in self.probs.items() if _above(difference, self.limits.fail_at)}


class Canary:
    """A fixed set of prompts that every version answers first."""

    def __init__(
        self,
        run_id: str,
        config: CanaryConfig,
        stack: StackConfig,
        policy: PolicyTrainer,
        prompts: list[np.ndarray],
        timeout_s: float,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._stack = stack
        self._policy = policy
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._rounding: dict[float, Rounding] = {}
        """The rounding that was measured last, by temperature."""

    @property
    def rounding(self) -> Rounding | None:
        """The largest distance of the trainer from float32 that was measured; None if none was."""
        return max(self._rounding.values(), default=None)

    async def check(self, version: Version, members: Sequence[Member]) -> CanaryOutcome:
        """Compare the probabilities; the outcome names the members that cannot answer or answer with other weights."""
        outcome = CanaryOutcome()
        passes: list[Judgement] = []
        for temperature in self._config.temperatures if self._prompts else ():
            answering = [member for member in members if member.name not in outcome.failures]
            found = await self._pass(version, answering, temperature, outcome.failures)
            if found is not None:
                passes.append(found)
        if passes:
            probs = np.concatenate([difference for one in passes for difference in one.probs.values()])
            logprobs = np.concatenate([difference for one in passes for difference in one.logprobs.values()])
            warn_at = [one.limits.warn_at for one in passes if one.limits.warn_at is not None]
            outcome.report = CanaryReport(
                float(probs.mean()),
                float(logprobs.mean()),
                float(logprobs.max()),
                int(logprobs.size),
                max(warn_at, default=None),
            )
        return outcome

    async def _pass(
        self,
        version: Version,
        members: Sequence[Member],
        temperature: float,
        failures: dict[str, FlotillaError],
    ) -> Judgement | None:
        """Check at one temperature, with a second look at members above the limit; None where nobody answered."""
        asked = len(self._prompts) * self._config.tokens
        first = 1
        if self._measures and temperature not in self._rounding:
            first = math.ceil(DECIDING_TOKENS / asked)
        answers = await self._responses(version, members, temperature, failures, range(first))
        if not answers:
            return None
        found = await self.judge(version, temperature, answers)
        if not found.above:
            return found
        suspects = [member for member in members if member.name in found.above]
        decided = max(asked, DECIDING_TOKENS)
        rounds = range(first, math.ceil(SECOND_LOOK * decided / asked))
        more = await self._responses(version, suspects, temperature, failures, rounds)
        answered = {answer.member for answer in more}
        again = [answer for answer in answers if answer.member in answered] + more
        if not again:
            return found
        second = await self.judge(version, temperature, again, of_tokens=decided)
        for name in second.above:
            failures[name] = self._mismatch(version, name, temperature, second.probs[name], second.limits)
        return Judgement(found.probs | second.probs, found.logprobs | second.logprobs, found.limits)

    async def judge(
        self, version: Version, temperature: float, answers: list[CanaryAnswer], of_tokens: int | None = None
    ) -> Judgement:
        """Compare answers at one temperature with the limits of a check of so many tokens, else of as many as these."""
        sequences = [(answer.prompt, answer.token_ids) for answer in answers]
        _, ours = await self._policy.logprobs(sequences, temperature)
        probs: dict[str, list[np.ndarray]] = {}
        logprobs: dict[str, list[np.ndarray]] = {}
        for answer, expected in zip(answers, ours, strict=True):
            probs.setdefault(answer.member, []).append(np.abs(np.exp(answer.logprobs) - np.exp(expected)))
            logprobs.setdefault(answer.member, []).append(np.abs(answer.logprobs - expected))
        pooled = {name: np.concatenate(parts) for name, parts in probs.items()}
        limits = await self._limits(temperature, sequences, ours, pooled, of_tokens)
        return Judgement(pooled, {name: np.concatenate(parts) for name, parts in logprobs.items()}, limits)

    async def _limits(
        self,
        temperature: float,
        sequences: list[tuple[np.ndarray, np.ndarray]],
        ours: list[np.ndarray],
        pooled: dict[str, np.ndarray],
        of_tokens: int | None,
    ) -> AgreementLimits:
        """Return the limits of these answers; measure rounding on them if it never was, or a member is above them.

        It is measured again only where they have the tokens for it.
        """
        fewest = min(difference.size for difference in pooled.values())
        tokens = of_tokens or fewest
        measured = self._rounding.get(temperature)
        limits = check_limits(self._stack, self._config, measured, tokens)
        above = any(_above(difference, limits.warn_at) for difference in pooled.values())
        if not self._measures or (measured is not None and not (above and fewest >= DECIDING_TOKENS)):
            return limits
        _, in_float32 = await self._policy.logprobs(sequences, temperature, in_float32=True)
        measured = Rounding.of(np.concatenate(ours), np.concatenate(in_float32))
        self._rounding[temperature] = measured
        return check_limits(self._stack, self._config, measured, tokens)

    @property
    def _measures(self) -> bool:
        """Whether the trainer rounds, and some limit goes by that."""
        automatic = "auto" in (self._config.warn_at, self._config.fail_at)
        return automatic and self._stack.trainer.dtype != "float32"

    def _mismatch(
        self,
        version: Version,
        member: str,
        temperature: float,
        difference: np.ndarray,
        limits: AgreementLimits,
    ) -> Mismatch:
        measured = self._rounding.get(temperature)
        explained = (
            "weights.canary.fail_at says how much may differ"
            if measured is None
            else f"rounding explains {measured.explained:.4f}: the trainer differs from float32 by {measured.mean:.4f}"
        )
        return Mismatch(
            f"{member} does not decode with the trainer's weights",
            where=f"run {self._run_id}, version {version}",
            why=f"it received them, and the digests match, but its token probabilities differ from the trainer's by "
            f"{difference.mean():.4f} on the mean of {difference.size} tokens, limit {limits.fail_at:.4f}; {explained}",
            next_step=f"restart {member} and resume the run; if it differs again, its engine computes another model "
            "than the trainer: compare both with dtype float32 in the stack, or set weights.canary.fail_at above a "
            "difference that you accept",
        )

    async def _responses(
        self,
        version: Version,
        members: Sequence[Member],
        temperature: float,
        failures: dict[str, FlotillaError],
        rounds: range,
    ) -> list[CanaryAnswer]:
        """Return the answers of all members that gave every one; the others are added to `failures`."""
        answers = await asyncio.gather(*(self._answers_of(m, version, temperature, rounds) for m in members))
        responses: list[CanaryAnswer] = []
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, FlotillaError):
                failures[member.name] = answer
            else:
                responses += answer
        return responses

    async def _answers_of(
        self, member: Member, version: Version, temperature: float, rounds: range
    ) -> list[CanaryAnswer] | FlotillaError:
        # A second greedy answer would be the first one again.
        parts = [(rounds[:1], temperature), (rounds[1:], temperature or 1.0)] if rounds.start == 0 else []
        try:
            answers = await gather_or_cancel(
                self._generate(member, prompt, index, version, drawn_at, part)
                for part, drawn_at in parts or [(rounds, temperature or 1.0)]
                for index, prompt in enumerate(self._prompts)
                if part
            )
        except FlotillaError as error:
            return error
        return [answer for several in answers for answer in several]

    async def _generate(
        self,
        member: Member,
        prompt: np.ndarray,
        index: int,
        version: Version,
        temperature: float,
        rounds: range,
    ) -> list[CanaryAnswer]:
        """Return one answer to this prompt for each round."""
        names = [
            f"{self._run_id}/canary/{version}/{index + number * len(self._prompts)}" for number in rounds
        ]
        request = pb.GenerateRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            prompt_token_ids=to_tensor(prompt),
            samples=[pb.SampleSlot(sample_id=name, seed=ids.derive_seed(name)) for name in names],
            sampling=pb.SamplingParams(
                temperature=temperature, max_tokens=self._config.tokens, ignore_eos=True
            ),
            min_version=version.to_proto(),
            priority=CANARY,
        )
        timeout_s = self._timeout_s * (1 if rounds.start == 0 else SECOND_LOOK)
        stream = rpc.server_stream(
            member.replica.stub.Generate, request, idle_timeout_s=timeout_s, timeout_s=timeout_s
        )
        answers: list[CanaryAnswer] = []
        async with aclosing(stream) as replies:
            async for reply in replies:
                for sample in reply.samples:
                    if sample.finish_reason == pb.FINISH_REASON_ABORT:
                        raise Unavailable(f"{member.name} gave a canary up")
                    logprobs = from_tensor(sample.logprobs).astype(np.float64)
                    tokens = from_tensor(sample.token_ids)
                    answers.append(CanaryAnswer(member.name, prompt, tokens, logprobs))
        if len(answers) != len(names):
            raise Unavailable(f"{member.name} ended a canary with {len(answers)} of {len(names)} samples")
        return answers


class LiveCheck:
    """Compares trainer and generators of a run on the same tokens, after each sync.

    The comparison may end in a later step than the sync, so `figures` keeps what the last one found. It calls `warn`
    with differences beyond `weights.canary.warn_at` in two checks in a row, because by chance alone one of forty is
    beyond it. It calls `measured` with what is known of the trainer's rounding.
    """

    def __init__(
        self,
        canary: Canary,
        figures: dict[str, float],
        measured: Callable[[Rounding], None],
        warn: Callable[[str], None],
    ) -> None:
        self._canary = canary
        self._figures = figures
        self._measured = measured
        self._warn = warn
        self._was_above = False

    async def verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        """Return the members that could not answer, or that answered with other weights, with the reasons."""
        started = time.monotonic()
        outcome = await self._canary.check(report.version, report.members)
        result = outcome.report
        if result is None:
            return outcome.failures
        self._figures |= {
            "canary/mean": result.probs_mean,
            "canary/logprob_mean": result.logprob_mean,
            "canary/max": result.logprob_max,
            "time/canary_s": time.monotonic() - started,
        }
        if (rounding := self._canary.rounding) is not None:
            self._figures |= {"canary/trainer_rounding": rounding.mean}
            self._measured(rounding)
        above = result.warn_at is not None and not result.probs_mean <= result.warn_at
        if above and self._was_above:
            self._warn(
                "trainer and generator differ in two checks in a row: mean probability difference "
                f"{result.probs_mean:.4f} at version {report.version}, above {result.warn_at:.4f} "
                "(weights.canary.warn_at)"
            )
        self._was_above = above
        return outcome.failures


def _above(difference: np.ndarray, limit: float | None) -> bool:
    """Return whether the mean is above a limit; one that is not a number is above any."""
    return limit is not None and not difference.mean() <= limit
