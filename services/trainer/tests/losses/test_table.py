"""Every policy loss against its paper's formula in float64, token by token: values, and gradients by differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_trainer.losses.correction import (
    within,
)
from flotilla_trainer.losses.divergence import TeacherTop, divergence, full_divergence, teacher_divergence
from flotilla_trainer.losses.policy_tokens import PolicyTokens
from flotilla_trainer.losses.table import LOSSES

TOLERANCE = 1e-6
STEP = 1e-6
LENGTHS = [3, 1, 7, 5, 4, 6]
SEQUENCES = [sequence for sequence, length in enumerate(LENGTHS) for _ in range(length)]
SEGMENTS = [0, 0, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, 9, 10, 10, 10, 10, 10]
COUNT = len(SEQUENCES)
RNG = np.random.default_rng(17)
NEW = -3 * RNG.random(COUNT) - 0.02
OLD = np.minimum(NEW + 0.5 * RNG.normal(size=COUNT), -0.01)
# Small sequence ratios, so that limits of 1e-2 and of 0.4 both cut somewhere.
ADVANTAGES = np.repeat(RNG.normal(size=len(LENGTHS)), LENGTHS)
MIXED = RNG.normal(size=COUNT)
SELECTED = RNG.random(COUNT) < 0.4

Token = Callable[[int, np.ndarray], float]
"""The part of a loss that a token is to carry, of all log-probabilities; the mean of these parts is compared."""


def of(sequence: int, cuts: list[int] = SEQUENCES) -> list[int]:
    return [i for i, s in enumerate(cuts) if s == sequence]


def ratio(i: int, new: np.ndarray) -> float:
    return math.exp(new[i] - OLD[i])


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(low: float, high: float, dual: float | None, a: np.ndarray) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        r = ratio(i, new)
        objective = min(r * a[i], clip(r, 1 - low, 1 + high) * a[i])
        if dual is not None and a[i] < 0:
            objective = max(objective, dual * a[i])
        return -objective

    return loss


def gspo(low: float, high: float, cuts: list[int] = SEQUENCES) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        tokens = of(cuts[i], cuts)
        s = math.exp(sum(new[t] - OLD[t] for t in tokens) / len(tokens))
        return -min(s * ADVANTAGES[i], clip(s, 1 - low, 1 + high) * ADVANTAGES[i])

    return loss


def gmpo(low: float, high: float) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        tokens, sign = of(SEQUENCES[i]), math.copysign(1, ADVANTAGES[i])
        product = 1.0
        for t in tokens:
            r = ratio(t, new)
            bounded = clip(r, math.exp(-low), math.exp(high))
            product *= min(r**sign, bounded**sign) ** sign
        return -(product ** (1 / len(tokens))) * ADVANTAGES[i]

    return loss


def constant_weight(weight: Token) -> Token:
    """Return -sg(w) A log p, with the weight from the log-probabilities at which the gradient is taken."""
    return lambda i, new: -weight(i, NEW) * ADVANTAGES[i] * new[i]


def sapo(positive: float, negative: float) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        tau = positive if MIXED[i] > 0 else negative
        return -(4 / tau) / (1 + math.exp(-tau * (ratio(i, new) - 1))) * MIXED[i]

    return loss


def clip_cov(low: float, high: float) -> Token:
    plain = ppo(low, high, None, MIXED)
    return lambda i, new: 0.0 if SELECTED[i] else plain(i, new)


def kl_cov(penalty: float) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        extra = penalty * abs(new[i] - OLD[i]) if SELECTED[i] else 0.0
        return -ratio(i, new) * MIXED[i] + extra

    return loss


def total_variation(p: float, q: float) -> float:
    return abs(p - q)


def binary_kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo(
    distance: Callable[[float, float], float],
    limit: float,
    low: float | None = None,
    cap: float | None = None,
) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        good = MIXED[i] > 0
        far = distance(math.exp(NEW[i]), math.exp(OLD[i])) > (limit if good or low is None else low)
        if far and (ratio(i, NEW) > 1) == good:
            return 0.0
        if cap is None:
            return -ratio(i, new) * MIXED[i]
        # A constant weight, so that the slope is the weight and the value at NEW that of the truncated ratio.
        return -min(ratio(i, NEW), cap) * MIXED[i] * (1 + new[i] - NEW[i])

    return loss


def topr(cap: float) -> Token:
    def weight(i: int, new: np.ndarray) -> float:
        if ADVANTAGES[i] >= 0:
            return 1.0
        return min(math.exp(sum(new[t] - OLD[t] for t in of(SEQUENCES[i]))), cap)

    return constant_weight(weight)


def kimi(tau: float) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        tokens = of(SEQUENCES[i])
        whole = sum(new[t] - OLD[t] for t in tokens)
        return (-ADVANTAGES[i] * whole + tau / 2 * whole**2) / len(tokens)

    return loss


def dro(beta: float) -> Token:
    return lambda i, new: -MIXED[i] * new[i] + beta / 2 * (new[i] - OLD[i]) ** 2


def raft_plus_plus(high: float) -> Token:
    def loss(i: int, new: np.ndarray) -> float:
        return -min(ratio(i, new), 1 + high) * MIXED[i] if MIXED[i] > 0 else 0.0

    return loss


def clips(low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"clip_low": low, "clip_high": high, **more}


def limits(high: float, low: float | None = None, ratio_cap: float | None = None) -> dict[str, Any]:
    return {"limit": high, "limit_low": low, "ratio_cap": ratio_cap}


TABLE: dict[str, tuple[str, dict[str, Any], np.ndarray, Token]] = {
    "ppo": ("ppo", clips(0.2, 0.2, dual_clip=None), MIXED, ppo(0.2, 0.2, None, MIXED)),
    "ppo, higher": ("ppo", clips(0.2, 0.28, dual_clip=None), MIXED, ppo(0.2, 0.28, None, MIXED)),
    "ppo, dual": ("ppo", clips(0.2, 0.2, dual_clip=1.5), MIXED, ppo(0.2, 0.2, 1.5, MIXED)),
    "reinforce": ("reinforce", {}, MIXED, lambda i, new: -MIXED[i] * new[i]),
    "gspo": ("gspo", clips(0.01, 0.02, over="sequence"), ADVANTAGES, gspo(0.01, 0.02)),
    "gspo, wide": ("gspo", clips(0.4, 0.4, over="sequence"), ADVANTAGES, gspo(0.4, 0.4)),
    "gspo, by turns": ("gspo", clips(0.2, 0.3, over="segment"), ADVANTAGES, gspo(0.2, 0.3, SEGMENTS)),
    "gmpo": ("gmpo", clips(0.4, 0.3), ADVANTAGES, gmpo(0.4, 0.3)),
    "cispo": (
        "cispo",
        clips(0.2, 0.3),
        ADVANTAGES,
        constant_weight(lambda i, new: clip(ratio(i, new), 0.8, 1.3)),
    ),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}, MIXED, sapo(1.0, 1.05)),
    "clip_cov": ("clip_cov", clips(0.2, 0.2), MIXED, clip_cov(0.2, 0.2)),
    "kl_cov": ("kl_cov", {"penalty": 0.7}, MIXED, kl_cov(0.7)),
    "dppo_tv": ("dppo_tv", limits(0.05), MIXED, dppo(total_variation, 0.05)),
    "dppo_tv, truncated": ("dppo_tv", limits(0.1, 0.02, 1.2), MIXED, dppo(total_variation, 0.1, 0.02, 1.2)),
    "dppo_kl": ("dppo_kl", limits(0.02), MIXED, dppo(binary_kl, 0.02)),
    "dppo_kl, truncated": ("dppo_kl", limits(0.05, 0.002, 1.1), MIXED, dppo(binary_kl, 0.05, 0.002, 1.1)),
    "topr": ("topr", {"negative_cap": 1.0}, ADVANTAGES, topr(1.0)),
    "kimi": ("kimi", {"tau": 0.3}, ADVANTAGES, kimi(0.3)),
    "dro": ("dro", {"beta": 0.3}, MIXED, dro(0.3)),
    "raft_plus_plus": ("raft_plus_plus", {"clip_high": 0.25}, MIXED, raft_plus_plus(0.25)),
}
WHOLE_SEQUENCES = {"kimi"}
"""Losses whose tokens carry shares that are only defined together: they are compared by their sums over sequences."""


def tokens_of(advantages: np.ndarray) -> PolicyTokens:
    return PolicyTokens(
        logprobs=torch.tensor(NEW, requires_grad=True),
        old_logprobs=torch.tensor(OLD),
        advantages=torch.tensor(advantages),
        sequences=torch.tensor(SEQUENCES),
        selected=torch.tensor(SELECTED),
        segments=torch.tensor(SEGMENTS),
    )


@pytest.mark.parametrize("row", TABLE)
def test_every_loss_and_its_gradient_equal_the_formula(row: str) -> None:
    name, parameters, advantages, formula = TABLE[row]
    tokens = tokens_of(advantages)
    loss = LOSSES[name](tokens, **parameters).loss
    expected = np.array([formula(i, NEW) for i in range(COUNT)])
    got = loss.detach().numpy()
    if name in WHOLE_SEQUENCES:
        expected, got = (np.bincount(SEQUENCES, weights=values) for values in (expected, got))
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)

    # The same weight for all tokens of a sequence, another for each sequence.
    weights = np.repeat(np.linspace(0.5, 2.0, len(LENGTHS)), LENGTHS)
    (torch.tensor(weights) * loss).sum().backward()
    assert tokens.logprobs.grad is not None

    def total(new: np.ndarray) -> float:
        return math.fsum(weights[i] * formula(i, new) for i in range(COUNT))

    shifts = STEP * np.eye(COUNT)
    slopes = [(total(NEW + shift) - total(NEW - shift)) / (2 * STEP) for shift in shifts]
    np.testing.assert_allclose(tokens.logprobs.grad.numpy(), slopes, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(slopes).max() > 0.01  # There is something to compare.


def test_no_loss_is_missing_from_the_table() -> None:
    assert {name for name, *_ in TABLE.values()} == set(LOSSES)


@pytest.mark.parametrize(
    "row",
    [
        "ppo",
        "ppo, dual",
        "gspo, wide",
        "gspo, by turns",
        "gmpo",
        "cispo",
        "clip_cov",
        "dppo_tv",
        "dppo_tv, truncated",
        "topr",
        "raft_plus_plus",
    ],
)
def test_every_limit_of_the_table_cuts_some_tokens_and_not_all(row: str) -> None:
    name, parameters, advantages, _ = TABLE[row]
    clipped = LOSSES[name](tokens_of(advantages), **parameters).clipped
    assert 0 < clipped.sum() < COUNT


OF_SOME_TOKENS = ("clip_cov", "kl_cov", "raft_plus_plus")


@pytest.mark.parametrize("row", [row for row in TABLE if TABLE[row][0] not in OF_SOME_TOKENS])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(row: str) -> None:
    name, parameters, _, _ = TABLE[row]
    tokens = tokens_of(ADVANTAGES)._replace(old_logprobs=torch.tensor(NEW))
    LOSSES[name](tokens, **parameters).loss.sum().backward()
    assert tokens.logprobs.grad is not None
    torch.testing.assert_close(tokens.logprobs.grad, -tokens.advantages, atol=1e-9, rtol=1e-9)


def top_of(theirs: np.ndarray, k: int, *, forward: bool, tail: bool) -> TeacherTop:
    """Return the answer of a teacher with these logits to a request for `k` tokens."""
    top = torch.tensor(theirs).log_softmax(-1).topk(k, dim=-1)
    return TeacherTop(top.indices, top.values, forward, tail)


@pytest.mark.parametrize("forward", [True, False])
def test_a_teacher_that_tells_of_the_whole_vocabulary_gives_the_divergence_of_whole_distributions(
    forward: bool,
) -> None:
    rng = np.random.default_rng(7)
    ours, theirs = 2 * rng.normal(size=(COUNT, 11)), 2 * rng.normal(size=(COUNT, 11))
    gradients, values = [], []
    for tail in (False, True, None):
        logits = torch.tensor(ours, requires_grad=True)
        other = torch.tensor(theirs)
        if tail is not None:
            got = teacher_divergence(logits, top_of(theirs, 11, forward=forward, tail=tail))
        else:
            got = full_divergence(other, logits) if forward else full_divergence(logits, other)
        got.sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
        values.append(got.detach())
    for value, gradient in zip(values[:2], gradients[:2], strict=True):
        torch.testing.assert_close(value, values[2], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(gradient, gradients[2], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("policy", ["sure of the same", "sure of another", "undecided"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("forward", [True, False])
def test_a_teacher_that_is_sure_to_the_last_digit_gives_finite_values_and_gradients(
    forward: bool, tail: bool, policy: str
) -> None:
    theirs = torch.tensor([[90.0, 0.0, -5.0, 1.0, -3000.0, 2.0]])
    ours = {
        "sure of the same": theirs.clone(),
        "sure of another": theirs.roll(3, -1),
        "undecided": torch.zeros_like(theirs),
    }[policy].requires_grad_()
    top = theirs.log_softmax(-1).topk(2, dim=-1)
    assert top.values.exp().sum() == 1  # Nothing is left for the others.
    got = teacher_divergence(ours, TeacherTop(top.indices, top.values, forward, tail))
    got.sum().backward()
    assert ours.grad is not None and ours.dtype == torch.float32
    assert torch.isfinite(got).all() and torch.isfinite(ours.grad).all()
    if policy == "sure of the same":
        # Up to what float32 can tell of a probability of nothing.
        assert abs(got.item()) < 1e-4
    elif policy == "sure of another" and (tail or forward):
        assert got.item() > 10
        # The likelier the teacher's token becomes, the smaller it is.
        assert (ours.grad[0, 0] < 0) or not forward


@pytest.mark.parametrize(("estimator", "distance"), [("k1", "none"), ("k2", "of ours"), ("k3", "of theirs")])
def test_what_the_gradient_of_an_estimator_pulls_at_on_average(estimator: str, distance: str) -> None:
    rng = np.random.default_rng(8)
    logits = torch.tensor(rng.normal(size=9), requires_grad=True)
    theirs = torch.tensor(rng.normal(size=9)).log_softmax(-1)
    ours = logits.log_softmax(-1)
    # Every token at once, as often as the policy draws it: the mean over samples without their noise.
    (ours.detach().exp() * divergence(estimator, ours, theirs)).sum().backward(retain_graph=True)
    drawn, logits.grad = logits.grad, None
    exact = {
        "none": 0.0 * logits.sum(),
        "of ours": (ours.exp() * (ours - theirs)).sum(),
        "of theirs": (theirs.exp() * (theirs - ours)).sum(),
    }[distance]
    exact.backward()
    assert drawn is not None and logits.grad is not None
    torch.testing.assert_close(drawn, logits.grad, atol=1e-12, rtol=1e-9)


MEASURES: dict[str, Callable[[float, float], float]] = {
    "k1": lambda p, q: math.log(p / q),
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "k3": lambda p, q: p / q - 1 - math.log(p / q),
    "difference": lambda p, q: p - q,
}
REJECTIONS = [
    ("k1", "token", 0.8, 1.25),
    ("k1", "sequence_sum", 0.5, 2.0),
    ("k1", "sequence_mean", 0.9, 1.1),
    ("k1", "sequence_max", 0.4, 2.0),
    ("k2", "token", None, 0.05),
    ("k2", "sequence_sum", None, 0.4),
    ("k2", "sequence_mean", None, 0.1),
    ("k2", "sequence_max", None, 0.3),
    ("k3", "token", None, 0.05),
    ("k3", "sequence_sum", None, 0.5),
    ("k3", "sequence_mean", None, 0.1),
    ("k3", "sequence_max", None, 0.3),
    ("difference", "token", -0.05, 0.05),
    ("difference", "sequence_sum", -0.1, 0.2),
    ("difference", "sequence_mean", None, 0.0),
    ("difference", "sequence_max", -0.2, None),
]


@pytest.mark.parametrize(("measure", "over", "low", "high"), REJECTIONS)
def test_rejections_equal_their_formulas(
    measure: str, over: str, low: float | None, high: float | None
) -> None:
    def inside(value: float) -> bool:
        compared = math.exp(value) if measure == "k1" else value
        return (low is None or compared >= low) and (high is None or compared <= high)

    each = [MEASURES[measure](math.exp(NEW[i]), math.exp(OLD[i])) for i in range(COUNT)]
    rows = [[each[i] for i in of(sequence)] for sequence in range(len(LENGTHS))]
    kept = {
        "token": [inside(value) for value in each],
        "sequence_sum": [inside(math.fsum(rows[s])) for s in SEQUENCES],
        "sequence_mean": [inside(math.fsum(rows[s]) / len(rows[s])) for s in SEQUENCES],
        "sequence_max": [all(map(inside, rows[s])) for s in SEQUENCES],
    }[over]
    assert 0 < sum(kept) < COUNT
    limits: dict[str, Any] = {"measure": measure, "over": over, "low": low, "high": high}
    got = within(torch.tensor(NEW), torch.tensor(OLD), torch.tensor(SEQUENCES), **limits)
    assert got.tolist() == kept
