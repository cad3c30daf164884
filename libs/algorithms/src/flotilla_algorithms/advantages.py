"""Every advantage of whole responses and of tokens: one function for each, in the order group, update, token.

Invariants: group-relative advantages sum to zero within a group, and a group of equal rewards gets exact zeros and so
teaches nothing; groups may differ in size and are told apart by their sizes alone, in the order of the samples. The
optimal baseline of a place is the mean of what its group still earned there, weighted by the squared length that the
gradient of each sample has come to by then; tokens of equal returns cancel exactly.
"""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes, checked_sizes, finite_rewards, segment_sums
from flotilla_algorithms.turns import Turns

STD_EPSILON = 1e-6
"""Keeps groups with nearly equal rewards from exploding when they are divided by their deviation."""

VARIANCE_EPSILON = 1e-8


def grpo(outcomes: Outcomes, *, baseline: str, normalize_std: bool) -> Floats:
    """Compare rewards within their group, the batch or the run (GRPO; without the deviation Dr. GRPO).

    Reward minus its baseline over the deviation of the same: of its `group`, of the whole `batch`, or `running`.

    The running ones are those of all rewards that the run learned from, this update's included.
    """
    if baseline == "running":
        seen = outcomes.history.after(outcomes.totals)
        return (outcomes.totals - seen.mean) / (seen.deviation + STD_EPSILON if normalize_std else 1.0)
    sizes = [outcomes.rewards.size] if baseline == "batch" else outcomes.group_sizes
    return group_advantages(outcomes.totals, sizes, normalize_std=normalize_std)


def group_advantages(
    rewards: ArrayLike,
    group_sizes: ArrayLike,
    *,
    normalize_std: bool = False,
    std_epsilon: float = STD_EPSILON,
) -> Floats:
    """Reward minus the mean of its group, over the group's standard deviation where asked for.

    The deviation is the sample one (divided by n - 1); a group of one has advantage zero.
    """
    values = finite_rewards(rewards)
    sizes = checked_sizes(group_sizes, values.size)
    if not values.size:
        return values
    # Measuring from the group's first reward makes equal rewards cancel exactly, whatever their value.
    relative = values - np.repeat(values[np.cumsum(sizes) - sizes], sizes)
    centred: Floats = relative - np.repeat(segment_sums(relative, sizes) / sizes, sizes)
    if not normalize_std:
        return centred
    variance = segment_sums(centred**2, sizes) / np.maximum(sizes - 1, 1)
    scaled: Floats = centred / (np.repeat(np.sqrt(variance), sizes) + std_epsilon)
    return scaled


def grpo_passk(outcomes: Outcomes, *, normalize_std: bool) -> Floats:
    """Reward the best sample of a group by what the group would lose without it (best of k).

    Return the largest reward of a group less its second largest for the best sample, and zero for all others.

    A group of one, or one whose best rewards are equal, gets zeros.
    """
    totals = outcomes.totals
    advantages = np.zeros(totals.size)
    for end, size in zip(
        np.cumsum(outcomes.group_sizes).tolist(), outcomes.group_sizes.tolist(), strict=True
    ):
        group = totals[end - size : end]
        if size < 2:
            continue
        second, first = np.sort(group)[-2:]
        scale = float(group.std(ddof=1)) + STD_EPSILON if normalize_std else 1.0
        advantages[end - size + int(group.argmax())] = (first - second) / scale
    return advantages


def pass_at_k(outcomes: Outcomes, *, k: int, right_at: float) -> Floats:
    """Raise the chance that one of k samples is right (pass@k training, analytic form).

    The expected group-relative advantage of a sample over all teams of k that its group can form.

    A team is right where one of its members is: it earned at least `right_at`, whatever was taken from its reward
    afterwards. A group that is smaller than k forms one team of all. Groups in which every team is right, or none is,
    get zeros.
    """
    right = outcomes.earned >= right_at
    advantages = np.zeros(right.size)
    end = 0
    for size in outcomes.group_sizes.tolist():
        members = slice(end, end + size)
        end += size
        for_right, for_wrong = _of_group(size, int(right[members].sum()), min(k, size))
        advantages[members] = np.where(right[members], for_right, for_wrong)
    return advantages


def _of_group(size: int, right: int, k: int) -> tuple[float, float]:
    wrong = size - right
    mean = 1.0 - comb(wrong, k) / comb(size, k)
    deviation = sqrt(mean * (1.0 - mean))
    if not deviation:
        return 0.0, 0.0
    # A wrong sample's own teams are right unless all its k - 1 team mates are wrong too.
    own_teams = 1.0 - comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    return (1.0 - mean) / deviation, (own_teams - mean) / deviation


def rloo(outcomes: Outcomes) -> Floats:
    """RLOO: reward minus the mean of the others of its group; a sample without others gets zero."""
    sizes = outcomes.group_sizes
    # r - (S - r) / (n - 1) is n / (n - 1) times the distance from the whole group's mean.
    factor = np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)
    advantages: Floats = factor * group_advantages(outcomes.totals, sizes)
    return advantages


def opo(outcomes: Outcomes) -> Floats:
    """OPO: reward minus the mean of its group weighted by length, which minimises the variance of the gradient."""
    lengths = outcomes.trained_lengths.astype(np.float64)
    totals, sizes = outcomes.totals, outcomes.group_sizes
    first = np.repeat(totals[np.cumsum(sizes) - sizes], sizes)
    # From the group's first reward on, so that equal rewards cancel exactly.
    relative = totals - first
    weight = np.maximum(outcomes.group_sums(lengths), 1.0)
    advantages: Floats = relative - np.repeat(outcomes.group_sums(lengths * relative) / weight, sizes)
    return advantages


def gpg(outcomes: Outcomes, *, normalize_std: bool) -> Floats:
    """Follow the group policy gradient (GPG).

    Group-relative advantages, scaled up by the share of samples whose group says something.

    Groups whose samples came to the same have no gradient; N / (N - M) for M samples in such groups makes up for their
    place in the mean over the update. Where these groups are left out they have no such place, and are not among N.
    """
    advantages = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    says = outcomes.group_sums(np.abs(advantages)) > 0
    speaking = max(int(outcomes.group_sizes[says].sum()), 1)
    scaled: Floats = np.asarray(advantages * (advantages.size / speaking))
    return scaled


def remax_of_greedy_rewards(outcomes: Outcomes) -> Floats:
    """ReMax over the greedy rewards that the outcomes bring along."""
    if outcomes.greedy_rewards is None:
        raise ValueError("remax needs the reward of a greedy response to each prompt")
    return remax(outcomes, outcomes.greedy_rewards)


def remax(outcomes: Outcomes, greedy_rewards: ArrayLike) -> Floats:
    """ReMax: reward minus that of the greedy response to the same prompt (one a group)."""
    greedy = finite_rewards(greedy_rewards)
    if greedy.shape != outcomes.group_sizes.shape:
        raise ValueError(f"{greedy.size} greedy rewards do not belong to {outcomes.group_sizes.size} groups")
    advantages: Floats = outcomes.totals - np.repeat(greedy, outcomes.group_sizes)
    return advantages


def gdpo_of_terms(outcomes: Outcomes, *, weights: ArrayLike) -> Floats:
    """GDPO over the terms that the outcomes bring along."""
    if outcomes.terms is None:
        raise ValueError("gdpo needs every term of the rewards by itself")
    return gdpo(outcomes, outcomes.terms, weights)


def gdpo(outcomes: Outcomes, terms: ArrayLike, weights: ArrayLike) -> Floats:
    """Normalise every term of the rewards by itself (GDPO, group reward-decoupled normalisation).

    Each term ([terms, samples]) normalised within its groups, then their weighted sum whitened over the update.

    Terms of different scale keep their say, where a sum of rewards would be ruled by the widest.
    """
    columns, factors = np.asarray(terms, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if columns.shape != (factors.size, outcomes.rewards.size):
        raise ValueError(f"terms of shape {columns.shape} do not belong to {factors.size} weights")
    total = np.zeros(outcomes.rewards.size)
    for column, factor in zip(columns, factors, strict=True):
        total += factor * group_advantages(column, outcomes.group_sizes, normalize_std=True)
    return whitened(outcomes.to_tokens(total), outcomes)


def reinforce(outcomes: Outcomes, *, gamma: float) -> Floats:
    """Credit every token with what comes after it (REINFORCE).

    Return what comes from each token on, discounted by the policy's own tokens alone.

    The reward comes with the last trained token, each penalty with its own; context is passed over and gets zero.
    """
    own, lengths = outcomes.trained, outcomes.trained_lengths
    gains = -outcomes.penalties[own]
    gains[(np.cumsum(lengths) - 1)[lengths > 0]] += outcomes.rewards[lengths > 0]
    advantages = np.zeros(own.size)
    advantages[own] = discounted(gains, lengths, gamma)
    return advantages


def discounted(values: Floats, lengths: Ints, factor: float) -> Floats:
    """Return the sum over k >= t of factor^(k - t) values_k within each response, for all responses at once."""
    sums = np.zeros_like(values)
    place = np.cumsum(lengths) - 1
    behind = np.zeros(lengths.size)
    for from_end in range(int(lengths.max(initial=0))):
        reached = lengths > from_end
        behind[reached] = values[place[reached] - from_end] + factor * behind[reached]
        sums[place[reached] - from_end] = behind[reached]
    return sums


def reinforce_plus_plus(outcomes: Outcomes, *, gamma: float) -> Floats:
    """REINFORCE++: discounted returns, whitened over the trained tokens of the update."""
    return whitened(reinforce(outcomes, gamma=gamma), outcomes)


def reinforce_plus_plus_baseline(outcomes: Outcomes) -> Floats:
    """Reward minus the mean of its group, whitened over the trained tokens of the update."""
    centred = group_advantages(outcomes.totals, outcomes.group_sizes)
    return whitened(outcomes.to_tokens(centred), outcomes)


def optimal_token_baseline(outcomes: Outcomes, *, lone_tail: str) -> Floats:
    """Return what is earned from each token on, less the baseline of its place in the response."""
    starts = np.cumsum(outcomes.response_lengths) - outcomes.response_lengths
    places = np.arange(outcomes.trained.size) - np.repeat(starts, outcomes.response_lengths)
    return _beyond_baselines(outcomes, places[outcomes.trained], lone_tail)


def tir_optimal_token_baseline(outcomes: Outcomes, *, lone_tail: str) -> Floats:
    """Return the same with places counted by trained tokens alone, for responses with context in between."""
    lengths = outcomes.trained_lengths
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return _beyond_baselines(outcomes, places, lone_tail)


def _beyond_baselines(outcomes: Outcomes, places: Ints, lone_tail: str) -> Floats:
    """Return one a token; `places` has that of every trained token.

    Where no other sample of the group has a token, `lone_tail` decides: silent compares the token with itself, so that
    it says nothing, and return compares it with nothing.
    """
    if outcomes.score_squares is None:
        raise ValueError("an optimal token baseline needs the policy's distribution at each token")
    own, lengths = outcomes.trained, outcomes.trained_lengths
    returns = reinforce(outcomes, gamma=1.0)[own]
    energy = _sums_so_far(outcomes.score_squares[own], lengths)
    groups = np.repeat(np.arange(outcomes.group_sizes.size), outcomes.group_sizes)
    width = int(places.max(initial=0)) + 1
    _, first, part = np.unique(
        np.repeat(groups, lengths) * width + places, return_index=True, return_inverse=True
    )
    count = np.bincount(part)
    # From the first return of each place on, so that equal returns cancel exactly.
    relative = returns - returns[first][part]
    weight, weighted = np.bincount(part, energy), np.bincount(part, energy * relative)
    plain = np.bincount(part, relative) / np.maximum(count, 1)
    # Where the policy was sure of every token so far, no gradient has a length and all weigh alike.
    baseline = np.where(weight > 0, weighted / np.where(weight > 0, weight, 1.0), plain)
    beyond = relative - baseline[part]
    advantages = np.zeros(own.size)
    advantages[own] = np.where(count[part] == 1, returns, beyond) if lone_tail == "return" else beyond
    return advantages


def _sums_so_far(values: Floats, lengths: Ints) -> Floats:
    """Return the sum of each sample's values up to each of its places."""
    total = np.cumsum(values)
    before = np.concatenate([[0.0], total])[np.cumsum(lengths) - lengths]
    sums: Floats = total - np.repeat(before, lengths)
    return sums


def gae(
    outcomes: Outcomes,
    values: ArrayLike,
    *,
    gamma: float,
    lam: float,
    bootstrap_truncated: bool,
    unit: str = "token",
) -> tuple[Floats, Floats]:
    """GAE: return advantages and returns of every token; `values` is the critic's estimate before each token.

    The reward of a turn comes with its last token, the rest with the last trained token of a response. The value after
    that is 0, unless the response was cut off and `bootstrap_truncated` is true: then it is the critic's estimate after
    the last token. Tokens that are context are passed over: they have no advantage, and their return is the critic's
    estimate. With the `unit` turn a turn is one step, from the estimate before its first token on: all of its tokens
    have its advantage and its return.
    """
    estimates = np.asarray(values, dtype=np.float64)
    if estimates.shape != outcomes.penalties.shape or not np.isfinite(estimates).all():
        raise ValueError(f"values must be {outcomes.penalties.size} finite numbers, one a token")
    if unit == "turn":
        return _gae_of_turns(outcomes, estimates, gamma, lam, bootstrap_truncated)
    own, lengths = outcomes.trained, outcomes.trained_lengths
    after = _expected_at_the_end(outcomes, bootstrap_truncated)
    advantages = np.zeros_like(estimates)
    advantages[own] = _sums_of_errors(estimates[own], outcomes.gains(), lengths, after, gamma, lam)
    return advantages, advantages + estimates


def _gae_of_turns(
    outcomes: Outcomes, estimates: Floats, gamma: float, lam: float, bootstrap_truncated: bool
) -> tuple[Floats, Floats]:
    turns = Turns.of(outcomes)
    expected = estimates[outcomes.trained][turns.first]
    after = _expected_at_the_end(outcomes, bootstrap_truncated)
    sums = _sums_of_errors(expected, turns.sums(outcomes.gains()), turns.counts, after, gamma, lam)
    returns = np.where(outcomes.trained, turns.to_tokens(sums + expected, outcomes), estimates)
    return turns.to_tokens(sums, outcomes), returns


def _sums_of_errors(
    expected: Floats, gains: Floats, lengths: Ints, after: Floats, gamma: float, lam: float
) -> Floats:
    """Return the discounted errors of the critic from each step on; `lengths` has the number of steps of each sample.

    `after` is what is still to come after the last step of a sample.
    """
    last = (np.cumsum(lengths) - 1)[lengths > 0]
    following = np.append(expected[1:], 0.0)[: expected.size]
    following[last] = after[lengths > 0]
    errors = gamma * following - expected + gains
    return discounted(errors, lengths, gamma * lam)


def _expected_at_the_end(outcomes: Outcomes, bootstrap_truncated: bool) -> Floats:
    """Return what is still to come after each response, one number a sample."""
    cut = outcomes.truncated
    if not bootstrap_truncated or cut is None or not cut.any():
        return np.zeros(outcomes.rewards.size)
    if outcomes.value_after is None:
        raise ValueError("gae needs the value after the last token of a response that was cut off")
    return np.where(cut, outcomes.value_after, 0.0)


def gae_of_values(
    outcomes: Outcomes, *, gamma: float, lam: float, bootstrap_truncated: bool, unit: str = "token"
) -> Floats:
    """Return the advantages, from the values that came with the outcomes."""
    if outcomes.values is None:
        raise ValueError("gae needs the values of a critic")
    advantages, _ = gae(
        outcomes, outcomes.values, gamma=gamma, lam=lam, bootstrap_truncated=bootstrap_truncated, unit=unit
    )
    return advantages


def distill(outcomes: Outcomes, *, coefficient: float, reward_weight: float) -> Floats:
    """Distill a teacher on-policy: reward each token by the teacher's lead over the policy that drew it.

    coefficient (log p_teacher - log p) of each token, and `reward_weight` times the advantage within its group.

    In the mean over samples this descends on the divergence of the policy from the teacher, token by token.
    """
    if outcomes.teacher_lead is None:
        raise ValueError("distill needs the log-probabilities of a teacher")
    advantages = coefficient * outcomes.teacher_lead
    if reward_weight:
        task = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=True)
        advantages = advantages + reward_weight * outcomes.to_tokens(task)
    return advantages


def whitened(advantages: Floats, outcomes: Outcomes) -> Floats:
    """Advantages of tokens, centred and scaled by the sample deviation (n - 1); untrained tokens get the same shift."""
    trained = advantages[outcomes.trained]
    if not trained.size:
        return advantages
    # From the first one on, so that equal advantages become exact zeros.
    relative = advantages - trained[0]
    centred = relative - (trained - trained[0]).mean()
    variance = (centred[outcomes.trained] ** 2).sum() / max(trained.size - 1, 1)
    white: Floats = centred / np.sqrt(variance + VARIANCE_EPSILON)
    return white
