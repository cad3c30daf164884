"""The loss of every optimizer step of an update, computed from sampled groups and a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flotilla_core.config import PolicyConfig
from flotilla_testing.exact_update import divergences
from flotilla_testing.exact_update.advantages import advantages_of, gae_returns
from flotilla_testing.exact_update.corrections import mean_importance, proximal_logprobs, token_weights
from flotilla_testing.exact_update.losses import Tokens, critic_loss, losses_of, selected_by_covariance
from flotilla_testing.exact_update.rewards import Judgement, judged
from flotilla_testing.exact_update.rollouts import Bools, Floats, Ints, Policies, Rollouts, logprobs_of
from flotilla_testing.exact_update.weights import aggregation_weights, sample_weights


@dataclass(frozen=True, eq=False)
class Step:
    """The loss of one optimizer step."""

    loss: float
    gradient: Floats
    """The gradient by the logits [tokens, vocabulary], or by the values [tokens] of a critic."""


@dataclass(frozen=True, eq=False)
class ExactUpdate:
    """The steps of an update, and what it leaves to the next one."""

    steps: list[Step]
    critic: list[Step]
    kl_coefficient: float
    seen: Floats
    """The values that a running mean has seen of it."""


@dataclass(frozen=True)
class Setting:
    """The inputs of an update besides its algorithm."""

    max_response_tokens: int
    term_weights: tuple[float, ...]
    seed: int
    own_advantage: Callable[..., Floats]
    """The formula of the user's advantage."""
    own_loss: Callable[..., torch.Tensor]
    """The formula of the user's loss."""


@dataclass(frozen=True, eq=False)
class _Whole:
    """The values that are computed for the whole update before its first step."""

    algorithm: PolicyConfig
    rollouts: Rollouts
    policies: Policies
    setting: Setting
    kl_coefficient: float
    judgement: Judgement
    advantages: Floats
    sample_weights: Floats
    selected: Bools
    importance_mean: float


def exact_update(
    algorithm: PolicyConfig,
    rollouts: Rollouts,
    policies: Policies,
    parts: Ints,
    setting: Setting,
    *,
    kl_coefficient: float,
    earlier: Floats,
    policy_learns: bool = True,
) -> ExactUpdate:
    """Return the update in one pass over mini-batches; `parts` numbers the mini-batch of each group."""
    penalties = _penalties(algorithm, rollouts, policies, kl_coefficient)
    judgement = judged(
        algorithm,
        rollouts,
        penalties,
        earlier,
        _score_squares(rollouts, policies),
        max_response_tokens=setting.max_response_tokens,
        seed=setting.seed,
    )
    advantages = advantages_of(algorithm.advantage, judgement, setting.term_weights, setting.own_advantage)
    of_samples = sample_weights(algorithm.sample_weights, rollouts, judgement.kept)
    counted = judgement.counted & (of_samples[rollouts.sample_of_token] > 0)
    selected = selected_by_covariance(
        algorithm.loss, rollouts.rollout_logprobs, advantages, counted, setting.seed
    )
    mean = _importance_mean(algorithm, rollouts, policies, counted)
    whole = _Whole(
        algorithm,
        rollouts,
        policies,
        setting,
        kl_coefficient,
        judgement,
        advantages,
        of_samples,
        selected,
        mean,
    )
    steps, measured = _policy_steps(whole, parts) if policy_learns else ([], None)
    after = kl_coefficient
    if algorithm.kl.placement != "none" and algorithm.kl.target is not None and measured is not None:
        after = divergences.adapted(
            kl_coefficient,
            measured,
            target=algorithm.kl.target,
            horizon_samples=algorithm.kl.horizon_samples,
            samples=rollouts.samples,
        )
    seen = judgement.seen if policy_learns and steps else np.zeros(0)
    return ExactUpdate(steps, _critic_steps(whole, parts), after, seen)


def _score_squares(rollouts: Rollouts, policies: Policies) -> Floats:
    """Return |d log p / d logits|^2 = the sum over the vocabulary of (1[token] - p)^2, for each token."""
    probabilities = torch.softmax(policies.steps[0], dim=-1)
    drawn = torch.nn.functional.one_hot(torch.from_numpy(rollouts.tokens), probabilities.shape[-1])
    squares: Floats = ((drawn - probabilities) ** 2).sum(-1).numpy()
    return squares


def _penalties(
    algorithm: PolicyConfig, rollouts: Rollouts, policies: Policies, kl_coefficient: float
) -> Floats:
    """Return the penalty of each trained token for its distance from the reference, under the sampling policy."""
    if algorithm.kl.placement != "reward":
        return np.zeros(len(rollouts.tokens))
    return np.where(rollouts.trained, kl_coefficient * _sampled_distance(algorithm, rollouts, policies), 0)


def _sampled_distance(algorithm: PolicyConfig, rollouts: Rollouts, policies: Policies) -> Floats:
    drawn = torch.from_numpy(rollouts.rollout_logprobs)
    distance = divergences.estimated(
        algorithm.kl.estimator, drawn, logprobs_of(policies.reference, rollouts.tokens)
    )
    made: Floats = distance.numpy()
    return made


def _importance_mean(
    algorithm: PolicyConfig, rollouts: Rollouts, policies: Policies, counted: Bools
) -> float:
    """Return the divisor of the update's importance weights."""
    if not algorithm.correction.normalize_importance:
        return 1.0
    own = np.flatnonzero(counted)
    before = logprobs_of(policies.steps[0][own], rollouts.tokens[own])
    return mean_importance(
        algorithm.correction,
        before - torch.from_numpy(rollouts.rollout_logprobs[own]),
        _same(rollouts.sequence_of_token[own]),
        _same(rollouts.segments[own]),
    )


def _policy_steps(whole: _Whole, parts: Ints) -> tuple[list[Step], float | None]:
    """Each mini-batch in which something counts, and the distance from the reference that was measured."""
    part_of_token = parts[whole.rollouts.group_of_token]
    batches = []
    for number in range(int(parts.max()) + 1):
        inside = part_of_token == number
        weight = aggregation_weights(
            whole.algorithm.aggregation,
            whole.rollouts,
            whole.judgement.counted & inside,
            whole.sample_weights,
            max_response_tokens=whole.setting.max_response_tokens,
        )
        if weight.any():
            batches.append((inside, weight))
    made = [
        _policy_step(whole, inside, weight, place, len(batches))
        for place, (inside, weight) in enumerate(batches)
    ]
    kl = whole.algorithm.kl
    if kl.placement == "none" or not made:
        return [step for step, _ in made], None
    if kl.estimator == "full":
        return [step for step, _ in made], float(np.mean([distance for _, distance in made]))
    trained = whole.rollouts.trained
    sampled = _sampled_distance(whole.algorithm, whole.rollouts, whole.policies)
    return [step for step, _ in made], float(sampled[trained].mean())


def _policy_step(
    whole: _Whole, inside: Bools, weight_of_token: Floats, place: int, steps: int
) -> tuple[Step, float]:
    """Return the step on the tokens inside its mini-batch, and the mean divergence of whole distributions on them."""
    algorithm, rollouts = whole.algorithm, whole.rollouts
    own = np.flatnonzero(rollouts.trained & inside)
    ids = rollouts.tokens[own]
    leaf = whole.policies.steps[place].clone().requires_grad_()
    logits, reference = leaf[own], whole.policies.reference[own]
    now = logprobs_of(logits, ids)
    before = logprobs_of(whole.policies.steps[0][own], ids)
    together, segment = _same(rollouts.sequence_of_token[own]), _same(rollouts.segments[own])

    def of(column: Any) -> torch.Tensor:
        return torch.from_numpy(column[own]).double()

    rollout, staleness = of(rollouts.rollout_logprobs), of(rollouts.staleness)
    old = proximal_logprobs(algorithm.correction, rollout, before, now, staleness, place / steps)
    trainer = now.detach() if algorithm.correction.proximal == "rollout" else old
    corrected = token_weights(algorithm.correction, trainer, rollout, together, segment)
    corrected = corrected / whole.importance_mean
    weight = of(weight_of_token)
    aged = weight * algorithm.correction.staleness_decay**staleness
    counts = (aged * corrected > 0).double()
    tokens = Tokens(
        now=now,
        old=old,
        advantages=of(whole.advantages),
        together=together * counts,
        segment=segment * counts,
        selected=of(whole.selected) > 0,
    )
    losses = losses_of(algorithm.loss, tokens, whole.setting.own_loss)
    loss = (aged * corrected * losses).sum()
    measured = 0.0
    if algorithm.kl.placement == "loss":
        if algorithm.kl.estimator == "full":
            distance = divergences.whole(logits, reference)
            measured = distance.mean().item()
        else:
            distance = divergences.estimated(algorithm.kl.estimator, now, logprobs_of(reference, ids))
        loss = loss + whole.kl_coefficient * (aged * distance).sum()
    if algorithm.teacher is not None:
        likeliest = torch.from_numpy(rollouts.teacher_ids[own])
        said = of(rollouts.teacher_id_logprobs)
        taught = divergences.from_teacher(algorithm.teacher, logits, likeliest, said)
        loss = loss + algorithm.teacher.coefficient * (aged * taught).sum()
    if algorithm.entropy_coefficient:
        probabilities = torch.softmax(logits, dim=-1)
        entropy = -(probabilities * torch.log(probabilities)).sum(-1)
        if algorithm.entropy_cap is not None:
            entropy = torch.where(entropy < algorithm.entropy_cap, entropy, algorithm.entropy_cap)
        loss = loss - algorithm.entropy_coefficient * (aged * entropy).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return Step(loss.item(), gradient.numpy()), measured


def _same(numbers: Ints) -> torch.Tensor:
    """[tokens, tokens]: 1 where two have the same number."""
    return torch.from_numpy(numbers[:, None] == numbers[None, :]).double()


def _critic_steps(whole: _Whole, parts: Ints) -> list[Step]:
    """Each mini-batch of the critic, which learns from every trained token."""
    critic = whole.algorithm.critic
    if critic is None:
        return []
    part_of_token = parts[whole.rollouts.group_of_token]
    returns = gae_returns(whole.algorithm.advantage, whole.judgement)
    steps = []
    for number, values in zip(range(int(parts.max()) + 1), whole.policies.critic, strict=False):
        inside = part_of_token == number
        leaf = values.clone().requires_grad_()
        loss = critic_loss(critic, whole.rollouts, returns, leaf, inside)
        (gradient,) = torch.autograd.grad(loss, leaf)
        steps.append(Step(loss.item(), gradient.numpy()))
    return steps
