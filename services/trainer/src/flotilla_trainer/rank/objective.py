"""The objective of one micro-batch, whatever its kind: loss, corrections and bonuses, weighted and summed.

Invariants: weights come from the front and hold the denominators of the whole update, so nothing is averaged here.
The gradient of a policy flows through `logprobs`, and through `entropy` where it earns a bonus. Where they are asked
for, it flows through the divergences of whole distributions and from a teacher as well, and through nothing else.
Sums and maxima are added up over micro-batches and ranks; a weight of zero adds nothing to them, whatever its value
is.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from flotilla_core.config import CriticConfig, PolicyConfig
from flotilla_core.config.algorithm import CorrectionConfig, KlConfig
from flotilla_core.config.losses import LossSection
from flotilla_core.errors import UserCodeError
from flotilla_trainer.losses.correction import (
    geometric_mask,
    icepop_weights,
    truncated_sequence_weights,
    truncated_token_weights,
    within,
)
from flotilla_trainer.losses.divergence import TeacherTop, divergence
from flotilla_trainer.losses.policy_tokens import (
    MAX_LOG_RATIO,
    PolicyTokens,
    TokenLosses,
    not_one,
    sequence_sums,
)
from flotilla_trainer.losses.table import LOSSES, PolicyLoss
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.reference_weights import ReferenceDistribution
from flotilla_trainer.rank.value_model import RewardModel, ValueModel
from flotilla_trainer.wire.objective import REWARD_MODEL, VALUE, ObjectiveSettings
from flotilla_trainer.wire.user_functions import is_user_function, load_user_function

Columns = dict[str, torch.Tensor]

SELECTING = ("share", "covariance_low", "covariance_high")
"""Parameters of losses that say which tokens of an update are treated apart."""


class LossTerms(NamedTuple):
    """`loss` carries the gradient; sums and maxima over its tokens are added up over micro-batches and ranks."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The sum of weights times values, to which a weight of zero adds nothing, whatever its value is."""
    return (weights * torch.where(weights != 0, values, 0.0)).sum()


class Objective:
    """A session's objective, ready to be applied to micro-batches."""

    def __init__(self, settings: ObjectiveSettings, reference: ReferenceDistribution | None = None) -> None:
        self._temperature = settings.temperature
        self._policy = settings.policy
        self._reference = reference if settings.compares_distributions else None
        self._loss = None if self._policy is None else _loss_named(self._policy.loss.type)

    @property
    def entropy_gradient(self) -> bool:
        """Return whether `entropy` has to carry a gradient."""
        return self._policy is not None and self._policy.entropy_coefficient > 0

    def on(self, model: PolicyModel, columns: Columns, chunk_tokens: int) -> LossTerms:
        """Compute the terms of a micro-batch, with the logits of `chunk_tokens` tokens at a time."""
        reference = self._reference.on(columns) if self._reference is not None else None
        scores = model(
            columns["tokens"],
            columns["positions"],
            columns["targets"].long(),
            temperature=self._temperature,
            chunk_tokens=chunk_tokens,
            packed_row=PackedRow.among(columns),
            entropy_gradient=self.entropy_gradient,
            reference=reference,
            teacher=self.teacher(columns),
        )
        if reference is not None:
            columns = columns | {"divergence": scores.divergence}
        if self._policy is not None and self._policy.teacher is not None:
            columns = columns | {"teacher_divergence": scores.teacher_divergence}
        return self(scores.logprobs, scores.entropy, columns)

    def teacher(self, columns: Columns) -> TeacherTop | None:
        """Return the teacher's likeliest tokens, where the policy learns from a teacher."""
        if self._policy is None or self._policy.teacher is None:
            return None
        teacher = self._policy.teacher
        ids, logprobs = columns["teacher_top_ids"].long(), columns["teacher_top_logprobs"]
        return TeacherTop(ids, logprobs, teacher.divergence == "forward", teacher.tail)

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, columns: Columns) -> LossTerms:
        """Compute the weighted sum over the tokens of a micro-batch, and its metrics."""
        weights = columns["weights"]
        sums = {"tokens": torch.ones_like(logprobs).sum(), "entropy": entropy.detach().sum()}
        maxima: Columns = {}
        if self._policy is None:
            loss = -weighted_sum(weights, logprobs)
        else:
            loss = self._policy_loss(self._policy, logprobs, columns, sums, maxima)
            if self._policy.entropy_coefficient:
                cap = self._policy.entropy_cap
                earned = entropy if cap is None else entropy.clamp(max=cap)
                loss = loss - self._policy.entropy_coefficient * weighted_sum(weights, earned)
        sums["loss"] = loss.detach()
        return LossTerms(loss, sums, maxima)

    def _policy_loss(
        self,
        policy: PolicyConfig,
        logprobs: torch.Tensor,
        columns: Columns,
        sums: Columns,
        maxima: Columns,
    ) -> torch.Tensor:
        now, weights, rollout = logprobs.detach(), columns["weights"], columns.get("rollout_logprobs")
        proximal = _proximal(policy.correction, now, rollout, columns)
        sequences = _numbered(columns["sequences"])
        segments = _numbered(columns["segments"]) if "segments" in columns else None
        if rollout is not None:
            trainer = now if policy.correction.proximal == "rollout" else proximal
            correction = _correction(policy.correction, trainer, rollout, sequences, segments)
            if "importance_scale" in columns:
                correction = correction * columns["importance_scale"]
            sums |= {"correction": correction.sum(), "left_out": (correction == 0).sum()}
            weights = torch.where(weights != 0, weights * correction, 0.0)
            _measure_distance(now, rollout, columns["fresh"], sums, maxima)
        counted = weights != 0
        losses = self._token_losses(
            policy.loss,
            PolicyTokens(
                # A gradient of zero times one that is not finite would not be zero: such a number does not get in.
                logprobs=torch.where(counted, logprobs, 0.0),
                old_logprobs=torch.where(counted, proximal, 0.0),
                advantages=columns["advantages"],
                sequences=sequences,
                selected=columns["selected"].bool() if "selected" in columns else None,
                counted=counted,
                segments=segments,
            ),
        )
        ratio = (now - proximal).clamp(max=MAX_LOG_RATIO).exp()
        sums |= {"clipped": losses.clipped.sum(), "ratio": ratio.sum()}
        loss = weighted_sum(weights, losses.loss)
        if "kl_weights" in columns:
            loss = loss + weighted_sum(columns["kl_weights"], _divergence(policy.kl, logprobs, columns, sums))
        if policy.teacher is not None:
            loss = loss + _taught(columns, sums)
        return loss

    def _token_losses(self, loss: LossSection, tokens: PolicyTokens) -> TokenLosses:
        assert self._loss is not None
        losses = self._loss(tokens, **_arguments(loss))
        if isinstance(losses, torch.Tensor):
            losses = TokenLosses(losses, not_one(tokens))
        if losses.loss.shape != tokens.logprobs.shape:
            raise UserCodeError(
                f"the loss has shape {list(losses.loss.shape)}, not one number for each of "
                f"{tokens.logprobs.numel()} tokens",
                where=loss.type,
            )
        return losses


def _proximal(
    correction: CorrectionConfig, now: torch.Tensor, rollout: torch.Tensor | None, columns: Columns
) -> torch.Tensor:
    """Return the log-probabilities that the ratio compares with; `now` where the policy has taken no step since."""
    if rollout is not None and correction.proximal == "rollout":
        return rollout
    if "proximal_logprobs" in columns:
        return columns["proximal_logprobs"]
    if rollout is None or "proximal_share" not in columns:
        return now
    return torch.lerp(rollout, now, columns["proximal_share"])


def _divergence(kl: KlConfig, logprobs: torch.Tensor, columns: Columns, sums: Columns) -> torch.Tensor:
    if kl.estimator != "full":
        reference = columns["reference_logprobs"]
        counted = torch.where(columns["kl_weights"] != 0, logprobs, reference)
        return divergence(kl.estimator, counted, reference)
    # The front, which says what the estimators find on the sampled tokens, does not see this one.
    sums["divergence"] = columns["divergence"].detach().sum()
    return columns["divergence"]


def _correction(
    asked: CorrectionConfig,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    sequences: torch.Tensor,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """Weights for the distance between trainer and rollout; ones where nothing is asked for."""
    log_ratio = trainer - rollout
    weights = torch.ones_like(log_ratio)
    cap, floor = asked.importance_cap, asked.importance_floor
    if asked.importance == "token":
        weights = truncated_token_weights(log_ratio, cap=cap)
    elif asked.importance == "segment":
        assert segments is not None, "the front cuts sequences for these weights"
        weights = truncated_sequence_weights(log_ratio, segments, cap=cap)
    elif asked.importance == "icepop_sequence":
        weights = icepop_weights(sequence_sums(log_ratio, sequences), low=floor, high=cap)
    elif asked.importance == "sequence":
        weights = truncated_sequence_weights(log_ratio, sequences, cap=cap)
    elif asked.importance == "icepop":
        weights = icepop_weights(log_ratio, low=floor, high=cap)
    if asked.sequence_low is not None or asked.sequence_high is not None:
        low = 0.0 if asked.sequence_low is None else asked.sequence_low
        high = float("inf") if asked.sequence_high is None else asked.sequence_high
        weights = weights * geometric_mask(log_ratio, sequences, low=low, high=high)
    for rejection in asked.rejection:
        weights = torch.where(within(trainer, rollout, sequences, **rejection.model_dump()), weights, 0.0)
    return weights


def _numbered(sequences: torch.Tensor) -> torch.Tensor:
    """Sequences of an update by their number within a micro-batch; their tokens are next to each other."""
    begins = torch.zeros_like(sequences, dtype=torch.long)
    begins[1:] = sequences[1:] != sequences[:-1]
    return begins.cumsum(0)


def _loss_named(name: str) -> PolicyLoss:
    return load_user_function(name) if is_user_function(name) else LOSSES[name]


def _arguments(loss: LossSection) -> dict[str, Any]:
    """Return what a loss is called with; what selects tokens is used up by the front, which sees the whole update."""
    if is_user_function(loss.type):
        return loss.arguments
    return {name: value for name, value in loss.arguments.items() if name not in SELECTING}


def _taught(columns: Columns, sums: Columns) -> torch.Tensor:
    """The divergence from the teacher, by the weights of the front."""
    weights, distance = columns["teacher_weights"], columns["teacher_divergence"]
    counted = weights != 0
    sums |= {
        "teacher_tokens": counted.sum(),
        "teacher_divergence": torch.where(counted, distance, 0.0).detach().sum(),
    }
    return weighted_sum(weights, distance)


def _measure_distance(
    now: torch.Tensor, rollout: torch.Tensor, fresh: torch.Tensor, sums: Columns, maxima: Columns
) -> None:
    """Measure how far the trainer's probabilities are from those that the rollout reported."""
    difference, p, q = (now - rollout).abs(), now.exp(), rollout.exp()
    moved, bounded = (p - q).abs(), (now - rollout).clamp(max=MAX_LOG_RATIO)
    sums |= {
        "logprob_diff": difference.sum(),
        "probs_diff": moved.sum(),
        "fresh": fresh.sum(),
        "fresh_probs_diff": (fresh * moved).sum(),
        "rollout_kl": (torch.expm1(bounded) - bounded).sum(),
        "trainer_probs": p.sum(),
        "rollout_probs": q.sum(),
        "trainer_squares": p.double().square().sum(),
        "rollout_squares": q.double().square().sum(),
        "products": (p.double() * q.double()).sum(),
    }
    if now.numel():
        maxima |= {"logprob_diff": difference.max(), "probs_diff": moved.max()}


class RewardObjective:
    """A reward model's loss on one micro-batch: rewards times the weights that the front made from the whole update.

    A weighted sum of rewards.
    """

    def on(self, model: RewardModel, columns: Columns, chunk_tokens: int) -> LossTerms:
        """Compute the terms of a micro-batch; a head of one number needs no chunks."""
        rewards = model(columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns))
        return self(rewards, columns)

    def __call__(self, rewards: torch.Tensor, columns: Columns) -> LossTerms:
        """The weighted sum over the answers of a micro-batch, and how many tokens they have."""
        loss = weighted_sum(columns["weights"], rewards)
        return LossTerms(loss, {"tokens": columns["answer_tokens"].sum(), "loss": loss.detach()}, {})


class ValueObjective:
    """A critic's loss on one micro-batch.

    Half the squared distance from the returns, clipped around the old values.
    """

    def __init__(self, critic: CriticConfig) -> None:
        self._clip = critic.value_clip

    def on(self, model: ValueModel, columns: Columns, chunk_tokens: int) -> LossTerms:
        """Compute the terms of a micro-batch; a head of one number needs no chunks."""
        return self(
            model(columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns)), columns
        )

    def __call__(self, values: torch.Tensor, columns: Columns) -> LossTerms:
        """Compute the weighted sum over the tokens of a micro-batch, and its metrics."""
        returns, weights = columns["returns"], columns["weights"]
        losses = (values - returns).square()
        clipped = torch.zeros_like(losses, dtype=torch.bool)
        if self._clip is not None:
            old = columns["old_values"]
            bounded = (torch.clamp(values, old - self._clip, old + self._clip) - returns).square()
            clipped = bounded > losses
            losses = torch.maximum(losses, bounded)
        loss = 0.5 * weighted_sum(weights, losses)
        sums = {"tokens": torch.ones_like(losses).sum(), "clipped": clipped.sum(), "loss": loss.detach()}
        return LossTerms(loss, sums, {})


class RankObjective(Protocol):
    """An objective of any kind."""

    def on(self, model: Any, columns: dict[str, torch.Tensor], chunk_tokens: int) -> LossTerms:
        """Compute the terms of a micro-batch; the model fits the objective, because a session's role chooses both."""


def rank_objective(
    settings: ObjectiveSettings, reference: ReferenceDistribution | None = None
) -> RankObjective:
    """Ready to be applied to micro-batches; `reference` where the session keeps one."""
    if settings.kind == VALUE:
        assert settings.policy is not None and settings.policy.critic is not None, "checked by the front"
        return ValueObjective(settings.policy.critic)
    return RewardObjective() if settings.kind == REWARD_MODEL else Objective(settings, reference)
