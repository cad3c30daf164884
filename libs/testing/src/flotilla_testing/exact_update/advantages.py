"""Every advantage by its paper's formula, one number a sample or a token."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from flotilla_testing.exact_update.lookup import formula_of
from flotilla_testing.exact_update.rewards import Judgement
from flotilla_testing.exact_update.rollouts import Floats, Rollouts


def advantages_of(
    section: Any, judgement: Judgement, term_weights: tuple[float, ...], own: Callable[..., Floats]
) -> Floats:
    """One a token, whitened and then bounded as the section asks; `own` is the function of the user's.

    What is left out of the update gets zeros, and nothing of the rest knows of it.
    """
    made = np.zeros(len(judgement.penalties))
    if not judgement.kept.any():
        return made
    arguments = dict(section.arguments)
    if section.type == "gdpo":
        arguments["weights"] = arguments["weights"] or term_weights
    formula = formula_of(section.type, FORMULAS, own)
    stays = judgement.of_kept()
    if section.type == "distill":
        arguments["taught"] = taught(section, stays.rollouts)
    given = formula(stays, **arguments)
    by_token = given if len(given) == len(stays.penalties) else given[stays.rollouts.sample_of_token]
    if section.whiten:
        by_token = whitened(by_token, stays)
    if section.clip is not None:
        by_token = np.clip(by_token, -section.clip, section.clip)
    made[judgement.kept[judgement.rollouts.sample_of_token]] = by_token
    return made


def whitened(by_token: Floats, judgement: Judgement) -> Floats:
    """Mean 0 and deviation 1 over the trained tokens."""
    counted = by_token[judgement.rollouts.trained]
    # Equal numbers are compared exactly, not by what rounding leaves of their deviation.
    if not len(counted) or np.ptp(counted) == 0:
        return np.zeros_like(by_token)
    white: Floats = (by_token - counted.mean()) / math.sqrt(counted.var(ddof=1) + 1e-8)
    return white


def _by_group(judgement: Judgement, values: Floats, formula: Callable[[Floats], Floats]) -> Floats:
    made = np.zeros(len(values))
    for members in judgement.rollouts.members:
        made[members] = formula(values[members])
    return made


def _centred(values: Floats) -> Floats:
    """Values minus their mean; exact zeros where all are equal."""
    return np.zeros(len(values)) if np.ptp(values) == 0 else values - math.fsum(values) / len(values)


def _standardised(values: Floats) -> Floats:
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return _centred(values) / (deviation + 1e-6)


def grpo(judgement: Judgement, *, baseline: str, normalize_std: bool) -> Floats:
    """(R - mean) / std of the group, of the update, or of the run so far."""
    formula = _standardised if normalize_std else _centred
    totals = judgement.totals
    if baseline == "group":
        return _by_group(judgement, totals, formula)
    if baseline == "batch":
        return formula(totals)
    seen = np.concatenate([judgement.earlier, totals])
    return formula(seen)[len(judgement.earlier) :]


def grpo_passk(judgement: Judgement, *, normalize_std: bool) -> Floats:
    """The largest reward of a group less the second largest, for the first that has it; nothing for the others."""

    def formula(values: Floats) -> Floats:
        made = np.zeros(len(values))
        if len(values) > 1:
            best, second = sorted(values, reverse=True)[:2]
            deviation = values.std(ddof=1) + 1e-6 if normalize_std else 1.0
            made[values.tolist().index(best)] = (best - second) / deviation
        return made

    return _by_group(judgement, judgement.totals, formula)


def step_reinforce(judgement: Judgement, *, gamma: float, baseline: str, normalize_std: bool) -> Floats:
    """Return the discounted reward of each turn and the later ones of its sample, compared with other turns."""
    rollouts = judgement.rollouts
    numbers, groups, returns = [], [], []
    for sample, own in enumerate(rollouts.own_tokens):
        turns = np.unique(rollouts.segments[own])
        if len(turns):
            numbers.append(turns)
            groups.append(np.full(len(turns), rollouts.group_of_sample[sample]))
            returns.append(_discounted(judgement.gains_of_turns(sample), gamma))
    turn, group = np.concatenate(numbers), np.concatenate(groups)
    value: Floats = np.concatenate(returns)
    formula = _standardised if normalize_std else _centred
    if baseline == "batch":
        value = formula(value)
    if baseline == "group":
        compared = value.copy()
        for number in np.unique(group):
            compared[group == number] = formula(value[group == number])
        value = compared
    made = np.zeros(len(rollouts.tokens))
    own = np.flatnonzero(rollouts.trained)
    made[own] = value[np.searchsorted(turn, rollouts.segments[own])]
    return made


def gigpo(judgement: Judgement, *, gamma: float, step_weight: float, normalize_std: bool) -> Floats:
    """Return the sample within its group, and each turn among those of the group that were asked in its state."""
    rollouts = judgement.rollouts
    formula = _standardised if normalize_std else _centred
    made = _by_group(judgement, judgement.totals, formula)[rollouts.sample_of_token]
    met: dict[tuple[int, int], list[tuple[Any, float]]] = {}
    for sample in range(rollouts.samples):
        turns = rollouts.turns(sample)
        returns = _discounted(judgement.gains_of_turns(sample), gamma)
        for turn, value in zip(turns, returns, strict=True):
            state = int(rollouts.turn_states[turn[-1]])
            if state:
                met.setdefault((int(rollouts.group_of_sample[sample]), state), []).append((turn, value))
    for compared in met.values():
        values = formula(np.array([value for _, value in compared]))
        for (turn, _), value in zip(compared, values, strict=True):
            made[turn] += step_weight * value
    return made


def rloo(judgement: Judgement) -> Floats:
    """R minus the mean of the others of the group."""

    def formula(values: Floats) -> Floats:
        if len(values) == 1:
            return np.zeros(1)
        others: Floats = (values.sum() - values) / (len(values) - 1)
        return values - others

    return _by_group(judgement, judgement.totals, formula)


def _discounted(gains: Floats, factor: float) -> Floats:
    """At each place the sum of what comes from there on, each step later worth `factor` less."""
    places = np.arange(len(gains))
    later = places[None, :] - places[:, None]
    return np.where(later >= 0, factor ** np.maximum(later, 0), 0) @ gains


def reinforce(judgement: Judgement, *, gamma: float) -> Floats:
    """Return the discounted sum of what comes from a token on, over the trained tokens of its sample."""
    made = np.zeros(len(judgement.penalties))
    for sample, own in enumerate(judgement.rollouts.own_tokens):
        gains = -judgement.penalties[own]
        if len(own):
            gains[-1] += judgement.rewards[sample]
            made[own] = _discounted(gains, gamma)
    return made


def reinforce_plus_plus(judgement: Judgement, *, gamma: float) -> Floats:
    """Return the returns, whitened over the update."""
    return whitened(reinforce(judgement, gamma=gamma), judgement)


def reinforce_plus_plus_baseline(judgement: Judgement) -> Floats:
    """R minus the mean of its group, whitened over the update."""
    centred = _by_group(judgement, judgement.totals, _centred)
    return whitened(centred[judgement.rollouts.sample_of_token], judgement)


def opo(judgement: Judgement) -> Floats:
    """R minus the mean of the group weighted by length."""
    lengths = np.array([len(own) for own in judgement.rollouts.own_tokens], np.float64)
    made = np.zeros(len(lengths))
    for members in judgement.rollouts.members:
        totals, own = judgement.totals[members], lengths[members]
        made[members] = 0 if np.ptp(totals) == 0 else totals - (own * totals).sum() / max(own.sum(), 1)
    return made


def gpg(judgement: Judgement, *, normalize_std: bool) -> Floats:
    """N / (N - M) (R - mean of the group), M samples of N in groups that came to the same."""
    totals, members = judgement.totals, judgement.rollouts.members
    silent = sum(len(group) for group in members if np.ptp(totals[group]) == 0)
    made = _by_group(judgement, totals, _standardised if normalize_std else _centred)
    return made * len(totals) / max(len(totals) - silent, 1)


def pass_at_k(judgement: Judgement, *, k: int, right_at: float) -> Floats:
    """Compute by brute force: all teams of k, their rewards standardised, a sample's mean over its teams."""

    def formula(values: Floats) -> Floats:
        right = values >= right_at
        teams = list(itertools.combinations(range(len(values)), min(k, len(values))))
        rewards = [float(right[list(team)].any()) for team in teams]
        deviation = statistics.pstdev(rewards)
        if deviation == 0:
            return np.zeros(len(values))
        shifted = [(reward - statistics.fmean(rewards)) / deviation for reward in rewards]
        return np.array(
            [
                statistics.fmean(s for s, team in zip(shifted, teams, strict=True) if place in team)
                for place in range(len(values))
            ]
        )

    return _by_group(judgement, judgement.earned, formula)


def gae(judgement: Judgement, *, gamma: float, lam: float, bootstrap_truncated: bool, unit: str) -> Floats:
    """Return the sum over later steps of (gamma lam)^distance times the error of the critic there.

    A step is a token, or a turn, of which the critic's value is that before its first token.
    """
    rollouts = judgement.rollouts
    made = np.zeros(len(judgement.penalties))
    for sample, own in enumerate(rollouts.own_tokens):
        if not len(own):
            continue
        by_turn = unit == "turn"
        steps = rollouts.turns(sample) if by_turn else [own[place : place + 1] for place in range(len(own))]
        gains = judgement.gains_of_turns(sample) if by_turn else judgement.gains(sample)
        goes_on = bootstrap_truncated and rollouts.truncated[sample]
        values = np.array([rollouts.values[step[0]] for step in steps])
        following = np.append(values[1:], rollouts.values_after[sample] if goes_on else 0.0)
        sums = _discounted(gains + gamma * following - values, gamma * lam)
        for step, value in zip(steps, sums, strict=True):
            made[step] = value
    return made


def gae_returns(section: Any, judgement: Judgement) -> Floats:
    """Return what a critic learns for each token: the advantage of its step, and the value before that step."""
    rollouts = judgement.rollouts
    before = rollouts.values.copy()
    if section.unit == "turn":
        for sample in range(rollouts.samples):
            for turn in rollouts.turns(sample):
                before[turn] = rollouts.values[turn[0]]
    return gae(judgement, **section.arguments) + before


def taught(section: Any, rollouts: Rollouts) -> Floats:
    """Return log p_teacher at each token.

    The teacher is the one without a name or the one of the prompt; several are averaged by their weights.
    """
    if not section.teachers:
        return rollouts.teacher_logprobs
    if section.teacher_field is not None:
        names = rollouts.teacher_of_group[rollouts.group_of_token]
        said = [rollouts.named_teachers[name][place] for place, name in enumerate(names)]
        return np.array(said)
    total = sum(section.teachers.values())
    mean: Floats = sum(
        weight / total * rollouts.named_teachers[name] for name, weight in section.teachers.items()
    )
    return mean


def distill(judgement: Judgement, *, coefficient: float, reward_weight: float, taught: Floats) -> Floats:
    """Return coefficient (log p_teacher - log p_rollout) at each token, plus the group's comparison of rewards."""
    rollouts = judgement.rollouts
    lead = coefficient * (taught - rollouts.rollout_logprobs)
    compared = _by_group(judgement, judgement.totals, _standardised)
    return lead + reward_weight * compared[rollouts.sample_of_token]


def gdpo(judgement: Judgement, *, weights: tuple[float, ...]) -> Floats:
    """Each term standardised within its group, then their weighted sum whitened over the update."""
    rollouts = judgement.rollouts
    total = np.zeros(rollouts.samples)
    for weight, term in zip(weights, rollouts.terms.T, strict=True):
        total += weight * _by_group(judgement, term, _standardised)
    return whitened(total[rollouts.sample_of_token], judgement)


def optimal_token_baseline(judgement: Judgement, *, lone_tail: str) -> Floats:
    """G_t less the mean of what the group earned from the same place on, weighted by the energy up to there."""
    rollouts = judgement.rollouts
    starts = np.array([np.flatnonzero(rollouts.sample_of_token == n)[0] for n in range(rollouts.samples)])
    places = np.arange(len(rollouts.tokens)) - starts[rollouts.sample_of_token]
    return _beyond_baseline(judgement, [places[own] for own in rollouts.own_tokens], lone_tail)


def tir_optimal_token_baseline(judgement: Judgement, *, lone_tail: str) -> Floats:
    """Return the same where a place is that among the trained tokens."""
    places = [np.arange(len(own)) for own in judgement.rollouts.own_tokens]
    return _beyond_baseline(judgement, places, lone_tail)


def _beyond_baseline(judgement: Judgement, places: list[Any], lone_tail: str) -> Floats:
    rollouts = judgement.rollouts
    returns = reinforce(judgement, gamma=1.0)
    made = np.zeros(len(returns))
    for members in rollouts.members:
        at_place: dict[int, list[tuple[int, float]]] = {}
        for sample in members:
            own = rollouts.own_tokens[sample]
            energy = np.cumsum(judgement.score_squares[own])
            for place, token, weight in zip(places[sample], own, energy, strict=True):
                at_place.setdefault(int(place), []).append((token, weight))
        for compared in at_place.values():
            tokens, weights = [token for token, _ in compared], np.array([weight for _, weight in compared])
            baseline = (weights * returns[tokens]).sum() / weights.sum()
            made[tokens] = returns[tokens] - baseline
            if len(tokens) == 1:
                made[tokens] = returns[tokens] if lone_tail == "return" else 0
    return made


def remax(judgement: Judgement) -> Floats:
    """R minus what the greedy response to the same prompt earned."""
    return judgement.totals - judgement.greedy_rewards[judgement.rollouts.group_of_sample]


FORMULAS: dict[str, Callable[..., Floats]] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "step_reinforce": step_reinforce,
    "gigpo": gigpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "gae": gae,
    "distill": distill,
    "gdpo": gdpo,
    "remax": remax,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}
