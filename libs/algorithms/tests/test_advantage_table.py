"""Every advantage against its paper's formula, written out sample by sample in plain Python."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flotilla_algorithms import (
    ADVANTAGES,
    Outcomes,
    gae,
    remax,
    token_advantages,
    whitened,
)

TOLERANCE = 1e-9
RNG = np.random.default_rng(11)
SIZES = [4, 1, 5, 3, 2]
GROUPS = [
    [float(RNG.integers(0, 2)) + (0.25 if g == 2 else 0.0) for _ in range(n)] for g, n in enumerate(SIZES)
]
GROUPS[3] = [1.0, 1.0, 1.0]
"""All alike, and without penalties below: it says nothing."""
REWARDS = [reward for group in GROUPS for reward in group]
LENGTHS = [int(n) for n in RNG.integers(1, 8, len(REWARDS))]
PENALTIES = [list(RNG.normal(0, 0.1, n)) for n in LENGTHS]
TRAINED = [[bool(RNG.integers(0, 4)) or t == 0 for t in range(n)] for n in LENGTHS]
PENALTIES[10:13] = [[0.0] * n for n in LENGTHS[10:13]]
# Context pays nothing.
PENALTIES = [[x * own for x, own in zip(*row, strict=True)] for row in zip(PENALTIES, TRAINED, strict=True)]
VALUES = [list(RNG.normal(0, 1, n)) for n in LENGTHS]
TERMS = [[float(x) for x in RNG.normal(place, scale, len(REWARDS))] for place, scale in ((0, 1), (5, 100))]
GREEDY = [0.0, 1.0, 0.5, 1.0, 0.25]
LEADS = [list(RNG.normal(0, 1, n)) for n in LENGTHS]
CUT = [bool(RNG.integers(0, 2)) for _ in LENGTHS]
SQUARES = [[float(x) for x in RNG.uniform(0, 2, n)] for n in LENGTHS]
AFTER = [float(RNG.normal()) for _ in LENGTHS]
STATES = [[int(x) for x in RNG.integers(0, 3, n)] for n in LENGTHS]
"""The key of the state of the turn that ends at a token; 0 is none."""
Rows = list[list[float]]


def outcomes_of(samples: list[int], sizes: list[int], groups: list[int]) -> Outcomes:
    """What these samples came to, cut into groups of these sizes; `groups` names the groups that they are of."""
    return Outcomes.of(
        [REWARDS[i] for i in samples],
        sizes,
        [LENGTHS[i] for i in samples],
        [x for i in samples for x in TRAINED[i]],
        [x for i in samples for x in PENALTIES[i]],
        values=[x for i in samples for x in VALUES[i]],
        value_after=[AFTER[i] for i in samples],
        truncated=[CUT[i] for i in samples],
        score_squares=[x for i in samples for x in SQUARES[i]],
        teacher_lead=[x for i in samples for x in LEADS[i]],
        terms=np.array(TERMS)[:, samples],
        greedy_rewards=np.array(GREEDY)[groups],
        turn_states=[x for i in samples for x in STATES[i]],
    )


def outcomes() -> Outcomes:
    return outcomes_of(list(range(len(REWARDS))), SIZES, list(range(len(SIZES))))


TOTALS = [reward - math.fsum(row) for reward, row in zip(REWARDS, PENALTIES, strict=True)]


def grouped(values: list[float]) -> Rows:
    rest = iter(values)
    return [list(itertools.islice(rest, size)) for size in SIZES]


def on_tokens(samples: list[float]) -> Rows:
    return [[value] * length for value, length in zip(samples, LENGTHS, strict=True)]


def by_group(
    formula: Callable[[list[float], list[int]], list[float]], rewards_of: list[float] = TOTALS
) -> Rows:
    lengths = [sum(row) for row in TRAINED]
    parts = zip(grouped(rewards_of), grouped(lengths), strict=True)
    return on_tokens([value for rewards, sizes in parts for value in formula(rewards, sizes)])


def white(rows: Rows) -> Rows:
    trained = [
        x for row, mask in zip(rows, TRAINED, strict=True) for x, m in zip(row, mask, strict=True) if m
    ]
    mean, variance = statistics.fmean(trained), statistics.variance(trained)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def centred(rewards: list[float], lengths: list[int]) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def standardised(rewards: list[float], lengths: list[int]) -> list[float]:
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(r - statistics.fmean(rewards)) / (deviation + 1e-6) for r in rewards]


def left_out(rewards: list[float], lengths: list[int]) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def length_weighted(rewards: list[float], lengths: list[int]) -> list[float]:
    baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def teams(k: int, right_at: float) -> Callable[[list[float], list[int]], list[float]]:
    """Pass@k training by brute force: all teams of k, their rewards standardised, a sample's mean over its teams."""

    def formula(rewards: list[float], lengths: list[int]) -> list[float]:
        members = list(itertools.combinations(range(len(rewards)), min(k, len(rewards))))
        values = [float(any(rewards[i] >= right_at for i in team)) for team in members]
        deviation = statistics.pstdev(values)
        if deviation == 0:
            return [0.0] * len(rewards)
        mean = statistics.fmean(values)
        return [
            statistics.fmean(
                (v - mean) / deviation for team, v in zip(members, values, strict=True) if i in team
            )
            for i in range(len(rewards))
        ]

    return formula


def returns(gamma: float) -> Rows:
    """Discounted sums over the trained tokens of each sample as if they were all of it; context has none."""
    rows = []
    for reward, row, mask in zip(REWARDS, PENALTIES, TRAINED, strict=True):
        own = [t for t, is_own in enumerate(mask) if is_own]
        gains = [-row[t] for t in own]
        gains[-1] += reward
        found = [sum(gamma ** (k - t) * gains[k] for k in range(t, len(own))) for t in range(len(own))]
        rows.append([found[own.index(t)] if t in own else 0.0 for t in range(len(mask))])
    return rows


def sums_of_errors(gamma: float, lam: float, bootstrap: bool) -> Rows:
    """Generalised advantages by their definition, over the trained tokens of each sample as if they were all of it."""
    rows = []
    parts = zip(REWARDS, PENALTIES, VALUES, TRAINED, CUT, AFTER, strict=True)
    for reward, penalties, values, mask, cut, after in parts:
        own = [t for t, is_own in enumerate(mask) if is_own]
        errors = {}
        for place, t in enumerate(own):
            ends = place == len(own) - 1
            at_the_end = after if bootstrap and cut else 0.0
            following = at_the_end if ends else values[own[place + 1]]
            errors[t] = (reward if ends else 0.0) - penalties[t] + gamma * following - values[t]
        rows.append(
            [
                sum((gamma * lam) ** (own.index(k) - own.index(t)) * errors[k] for k in own if k >= t)
                if t in own
                else 0.0
                for t in range(len(mask))
            ]
        )
    return rows


def sums_of_errors_of_turns(gamma: float, lam: float) -> Rows:
    """Generalised advantages where a turn is one step, from the critic's estimate before its first token on."""
    rows = []
    parts = zip(REWARDS, PENALTIES, VALUES, TRAINED, CUT, AFTER, strict=True)
    for reward, penalties, values, mask, cut, after in parts:
        runs, row = turns_of(mask), [0.0] * len(mask)
        errors = []
        for number, run in enumerate(runs):
            ends = number == len(runs) - 1
            following = (after if cut else 0.0) if ends else values[runs[number + 1][0]]
            earned = (reward if ends else 0.0) - sum(penalties[place] for place in run)
            errors.append(earned + gamma * following - values[run[0]])
        for number, run in enumerate(runs):
            for place in run:
                row[place] = sum((gamma * lam) ** (k - number) * errors[k] for k in range(number, len(runs)))
        rows.append(row)
    return rows


def plus(rows: Rows, others: Rows) -> Rows:
    return [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(rows, others, strict=True)]


def whole_batch(normalize: bool) -> Rows:
    scale = statistics.stdev(TOTALS) + 1e-6 if normalize else 1.0
    return on_tokens([(r - statistics.fmean(TOTALS)) / scale for r in TOTALS])


def speaking_share() -> float:
    """Groups whose totals differ have a gradient, whatever their rewards were before the penalties."""
    silent = sum(len(group) for group in grouped(TOTALS) if len(set(group)) == 1)
    return len(REWARDS) / (len(REWARDS) - silent)


def scaled(rows: Rows, factor: float) -> Rows:
    return [[factor * value for value in row] for row in rows]


def terms_by_themselves(weights: list[float]) -> Rows:
    sums = [0.0] * len(REWARDS)
    for term, weight in zip(TERMS, weights, strict=True):
        normal = [x for group in grouped(term) for x in standardised(group, [])]
        sums = [s + weight * x for s, x in zip(sums, normal, strict=True)]
    return white(on_tokens(sums))


def beyond_greedy() -> Rows:
    return on_tokens([r - g for rewards, g in zip(grouped(TOTALS), GREEDY, strict=True) for r in rewards])


def best_of_group(normalize: bool) -> Rows:
    """Only the best of a group has an advantage: how far it is ahead of the second best."""
    rows: list[float] = []
    for rewards in grouped(TOTALS):
        ahead = sorted(rewards)[-1] - sorted(rewards)[-2] if len(rewards) > 1 else 0.0
        scale = statistics.stdev(rewards) + 1e-6 if normalize and len(rewards) > 1 else 1.0
        best = rewards.index(max(rewards))
        rows += [ahead / scale if i == best else 0.0 for i in range(len(rewards))]
    return on_tokens(rows)


def turns_of(mask: list[bool]) -> list[list[int]]:
    """The places of each run of trained tokens."""
    runs: list[list[int]] = []
    for place, own in enumerate(mask):
        if own and (place == 0 or not mask[place - 1]):
            runs.append([])
        if own:
            runs[-1].append(place)
    return runs


def worth_of_turns(gamma: float) -> list[list[float]]:
    """What each turn and the later ones of its sample earn."""
    worth: list[list[float]] = []
    for reward, penalties, mask in zip(REWARDS, PENALTIES, TRAINED, strict=True):
        gains = [-sum(penalties[place] for place in run) for run in turns_of(mask)]
        gains[-1] += reward
        worth.append(
            [sum(gamma ** (k - j) * gains[k] for k in range(j, len(gains))) for j in range(len(gains))]
        )
    return worth


def beside_equal_states(gamma: float, weight: float, normalize: bool) -> Rows:
    """The sample within its group, and `weight` times each turn among those of the group in its state."""
    worth = worth_of_turns(gamma)
    group_of = [group for group, size in enumerate(SIZES) for _ in range(size)]
    rows = by_group(standardised if normalize else centred)
    met: dict[tuple[int, int], list[tuple[float, int, list[int]]]] = {}
    for sample, mask in enumerate(TRAINED):
        for number, run in enumerate(turns_of(mask)):
            if state := STATES[sample][run[-1]]:
                found = met.setdefault((group_of[sample], state), [])
                found.append((worth[sample][number], sample, run))
    for turns in met.values():
        values = [value for value, *_ in turns]
        compared = (standardised if normalize else centred)(values, [])
        for value, (_, sample, run) in zip(compared, turns, strict=True):
            for place in run:
                rows[sample][place] += weight * value
    return rows


def returns_of_turns(gamma: float, baseline: str, normalize: bool) -> Rows:
    """The return of each turn, less the mean of all turns that it is compared with, over their deviation."""
    worth = worth_of_turns(gamma)
    group_of = [group for group, size in enumerate(SIZES) for _ in range(size)]
    rows: Rows = []
    for sample, mask in enumerate(TRAINED):
        row = [0.0] * len(mask)
        others = [
            value
            for other, values in enumerate(worth)
            for value in values
            if baseline == "batch" or group_of[other] == group_of[sample]
        ]
        for number, run in enumerate(turns_of(mask)):
            value = worth[sample][number]
            if baseline != "none":
                deviation = statistics.stdev(others) if len(others) > 1 else 0.0
                value = (value - statistics.fmean(others)) / (deviation + 1e-6 if normalize else 1.0)
            for place in run:
                row[place] = value
        rows.append(row)
    return rows


def beyond_optimal_baselines(by_own: bool, alone: str) -> Rows:
    """Reward to come less the weighted mean of that of all samples of the group at the same place."""
    tokens: dict[tuple[int, int], list[tuple[int, int, float, float]]] = {}
    group_of = [group for group, size in enumerate(SIZES) for _ in range(size)]
    for sample, mask in enumerate(TRAINED):
        own, energy = [t for t, is_own in enumerate(mask) if is_own], 0.0
        for number, t in enumerate(own):
            energy += SQUARES[sample][t]
            to_come = REWARDS[sample] - sum(PENALTIES[sample][k] for k in own[number:])
            key = group_of[sample], number if by_own else t
            tokens.setdefault(key, []).append((sample, t, to_come, energy))
    rows = [[0.0] * len(mask) for mask in TRAINED]
    for met in tokens.values():
        baseline = sum(g * w for *_, g, w in met) / sum(w for *_, w in met)
        for sample, t, to_come, _ in met:
            rows[sample][t] = to_come if len(met) == 1 and alone == "return" else to_come - baseline
    return rows


TABLE: dict[str, tuple[str, dict[str, Any], Rows]] = {
    "grpo": ("grpo", {"baseline": "group", "normalize_std": True}, by_group(standardised)),
    "dr_grpo": ("grpo", {"baseline": "group", "normalize_std": False}, by_group(centred)),
    "batch": ("grpo", {"baseline": "batch", "normalize_std": False}, whole_batch(False)),
    "batch_std": ("grpo", {"baseline": "batch", "normalize_std": True}, whole_batch(True)),
    "rloo": ("rloo", {}, by_group(left_out)),
    "reinforce": ("reinforce", {"gamma": 1.0}, returns(1.0)),
    "reinforce_discounted": ("reinforce", {"gamma": 0.9}, returns(0.9)),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 0.95}, white(returns(0.95))),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, white(by_group(centred))),
    "opo": ("opo", {}, by_group(length_weighted)),
    "gpg": ("gpg", {"normalize_std": False}, scaled(by_group(centred), speaking_share())),
    "gpg_std": ("gpg", {"normalize_std": True}, scaled(by_group(standardised), speaking_share())),
    "pass_at_2": ("pass_at_k", {"k": 2, "right_at": 0.9}, by_group(teams(2, 0.9), REWARDS)),
    "gae": (
        "gae",
        {"gamma": 0.98, "lam": 0.9, "bootstrap_truncated": True},
        sums_of_errors(0.98, 0.9, True),
    ),
    "gae_ended": (
        "gae",
        {"gamma": 0.98, "lam": 0.9, "bootstrap_truncated": False},
        sums_of_errors(0.98, 0.9, False),
    ),
    "gae_of_turns": (
        "gae",
        {"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True, "unit": "turn"},
        sums_of_errors_of_turns(0.9, 0.8),
    ),
    **{
        f"gigpo_{weight}{'_std' if normalize else ''}": (
            "gigpo",
            {"gamma": gamma, "step_weight": weight, "normalize_std": normalize},
            beside_equal_states(gamma, weight, normalize),
        )
        for gamma, weight, normalize in [(0.95, 1.0, True), (0.8, 0.5, True), (1.0, 2.0, False)]
    },
    "distill": ("distill", {"coefficient": 2.0, "reward_weight": 0.0}, scaled(LEADS, 2.0)),
    "distill_and_task": (
        "distill",
        {"coefficient": 0.5, "reward_weight": 3.0},
        plus(scaled(LEADS, 0.5), scaled(by_group(standardised), 3.0)),
    ),
    "gdpo": ("gdpo", {"weights": [1.0, 0.5]}, terms_by_themselves([1.0, 0.5])),
    "remax": ("remax", {}, beyond_greedy()),
    "grpo_passk": ("grpo_passk", {"normalize_std": False}, best_of_group(False)),
    "grpo_passk_std": ("grpo_passk", {"normalize_std": True}, best_of_group(True)),
    **{
        f"step_reinforce_{baseline}{'_std' if normalize else ''}": (
            "step_reinforce",
            {"gamma": 0.8, "baseline": baseline, "normalize_std": normalize},
            returns_of_turns(0.8, baseline, normalize),
        )
        for baseline, normalize in [
            ("none", False),
            ("group", False),
            ("group", True),
            ("batch", False),
            ("batch", True),
        ]
    },
    **{
        f"{prefix}optimal_token_baseline_{alone}": (
            f"{prefix}optimal_token_baseline",
            {"lone_tail": alone},
            beyond_optimal_baselines(prefix == "tir_", alone),
        )
        for prefix in ("", "tir_")
        for alone in ("silent", "return")
    },
    "pass_at_3": ("pass_at_k", {"k": 3, "right_at": 0.9}, by_group(teams(3, 0.9), REWARDS)),
}


@pytest.mark.parametrize("row", TABLE)
def test_every_advantage_equals_its_formula(row: str) -> None:
    name, parameters, expected = TABLE[row]
    got = token_advantages(ADVANTAGES[name], outcomes(), parameters)
    flat = [value for values in expected for value in values]
    assert np.abs(flat).max() > 0.01  # There is something to compare.
    np.testing.assert_allclose(got, flat, rtol=TOLERANCE, atol=TOLERANCE)


def test_no_advantage_is_missing_from_the_table() -> None:
    assert {name for name, _, _ in TABLE.values()} == set(ADVANTAGES)


@pytest.mark.parametrize("row", TABLE)
def test_the_order_of_groups_changes_no_advantage(row: str) -> None:
    name, parameters, expected = TABLE[row]
    order = [3, 0, 4, 2, 1]
    samples = [i for g in order for i in range(sum(SIZES[:g]), sum(SIZES[: g + 1]))]
    moved = outcomes_of(samples, [SIZES[g] for g in order], order)
    got = token_advantages(ADVANTAGES[name], moved, parameters)
    np.testing.assert_allclose(got, [x for i in samples for x in expected[i]], rtol=TOLERANCE, atol=TOLERANCE)


def test_pass_at_k_judges_what_a_sample_earned_and_not_what_it_paid_for() -> None:
    paid = Outcomes.of([1.0, 0.0, 1.0, 0.0], [4], penalties=[0.2, 0.1, 0.0, 0.3])
    free = Outcomes.of([1.0, 0.0, 1.0, 0.0], [4])
    found = ADVANTAGES["pass_at_k"](paid, k=2, right_at=1.0)
    assert found.any()
    np.testing.assert_array_equal(found, ADVANTAGES["pass_at_k"](free, k=2, right_at=1.0))


@pytest.mark.parametrize("row", TABLE)
def test_samples_that_are_left_out_count_nowhere(row: str) -> None:
    name, parameters, _ = TABLE[row]
    kept = np.array([g in (0, 2, 4) for g, size in enumerate(SIZES) for _ in range(size)])
    kept[5] = False  # one sample of a group that stays
    sizes = [SIZES[0], SIZES[2] - 1, SIZES[4]]
    chosen = [i for i in range(len(REWARDS)) if kept[i]]
    alone = outcomes_of(chosen, sizes, [0, 2, 4])
    expected = token_advantages(ADVANTAGES[name], alone, parameters, whiten=True)
    found = token_advantages(ADVANTAGES[name], outcomes(), parameters, kept=kept, whiten=True)
    of_kept = np.repeat(kept, LENGTHS)
    np.testing.assert_array_equal(found[of_kept], expected)
    assert not found[~of_kept].any()


def test_an_update_of_which_nothing_is_left_has_no_advantages() -> None:
    nothing = np.zeros(len(REWARDS), bool)
    assert not token_advantages(ADVANTAGES["grpo"], outcomes(), {}, kept=nothing, whiten=True).any()


NOT_BY_REWARDS_ALONE = ("reinforce", "gae", "distill", "gdpo", "remax")
COMPARED = [
    row
    for row, (name, parameters, _) in TABLE.items()
    if name not in NOT_BY_REWARDS_ALONE
    and "none" not in parameters.values()
    and "return" not in parameters.values()
]


@pytest.mark.parametrize("row", COMPARED)
def test_an_update_of_equal_rewards_teaches_exactly_nothing(row: str) -> None:
    name, parameters, _ = TABLE[row]
    parameters = parameters | ({"gamma": 1.0} if "gamma" in parameters else {})
    squares = RNG.uniform(0, 2, 19)
    equal = Outcomes.of(
        [0.3] * 7,
        [4, 3],
        [2, 3, 1, 4, 2, 2, 5],
        score_squares=squares,
        turn_states=RNG.integers(1, 3, 19),
    )
    assert not token_advantages(ADVANTAGES[name], equal, parameters).any()


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_the_sum_of_discounted_errors_and_returns_add_the_values(
    gamma: float, decay: float, bootstrap: bool
) -> None:
    values = [x for row in VALUES for x in row]
    advantages, targets = gae(outcomes(), values, gamma=gamma, lam=decay, bootstrap_truncated=bootstrap)
    expected = [x for row in sums_of_errors(gamma, decay, bootstrap) for x in row]
    np.testing.assert_allclose(advantages, expected, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(targets, np.add(expected, [x for row in VALUES for x in row]))


def test_gae_passes_over_samples_that_are_context_alone() -> None:
    values = [0.5, 0.25, 0.125]
    given = Outcomes.of(
        [1.0, 5.0], [2], [2, 1], [True, True, False], truncated=[False, True], value_after=[0.0, 3.0]
    )
    advantages, targets = gae(given, values, gamma=1.0, lam=1.0, bootstrap_truncated=True)
    np.testing.assert_allclose(advantages, [0.5, 0.75, 0.0])
    np.testing.assert_allclose(targets, [1.0, 1.0, 0.125])


def test_gae_expects_nothing_after_a_response_that_ended_and_the_critics_value_after_one_that_was_cut_off() -> (
    None
):
    given = Outcomes.of(
        [1.0, 1.0], [2], [2, 2], truncated=[True, False], value_after=[0.5, 0.5], values=[0.25] * 4
    )
    found = ADVANTAGES["gae"](given, gamma=1.0, lam=1.0, bootstrap_truncated=True)
    np.testing.assert_allclose(found, [1.25, 1.25, 0.75, 0.75])
    ended = ADVANTAGES["gae"](given, gamma=1.0, lam=1.0, bootstrap_truncated=False)
    np.testing.assert_allclose(ended, [0.75] * 4)
    unknown = Outcomes.of([1.0], [1], truncated=[True], values=[0.25])
    with pytest.raises(ValueError, match="of a response that was cut off"):
        ADVANTAGES["gae"](unknown, gamma=1.0, lam=1.0, bootstrap_truncated=True)


NEEDS = [
    ("gae", "values of a critic"),
    ("distill", "of a teacher"),
    ("gdpo", "every term"),
    ("remax", "greedy response"),
    ("gigpo", "state in which each turn was asked"),
    ("optimal_token_baseline", "distribution at each token"),
    ("tir_optimal_token_baseline", "distribution at each token"),
]


@pytest.mark.parametrize(("name", "needs"), NEEDS)
def test_an_advantage_says_what_it_lacks(name: str, needs: str) -> None:
    parameters = {
        "gae": {"gamma": 1.0, "lam": 1.0, "bootstrap_truncated": True},
        "distill": {"coefficient": 1.0, "reward_weight": 0.0},
        "gdpo": {"weights": [1.0]},
        "remax": {},
        "gigpo": {"gamma": 1.0, "step_weight": 1.0, "normalize_std": True},
        "optimal_token_baseline": {"lone_tail": "silent"},
        "tir_optimal_token_baseline": {"lone_tail": "return"},
    }
    with pytest.raises(ValueError, match=needs):
        ADVANTAGES[name](Outcomes.of([1.0], [1]), **parameters[name])


def test_remax_takes_one_greedy_reward_a_group() -> None:
    expected = [r - g for rewards, g in zip(grouped(TOTALS), GREEDY, strict=True) for r in rewards]
    np.testing.assert_allclose(remax(outcomes(), GREEDY), expected, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="4 greedy rewards do not belong to 5 groups"):
        remax(outcomes(), GREEDY[1:])


def test_whitened_tokens_have_mean_zero_and_deviation_one() -> None:
    trained = outcomes().trained
    values = whitened(RNG.normal(3, 7, trained.size), outcomes())[trained]
    assert values.mean() == pytest.approx(0, abs=1e-12)
    assert values.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_advantages_are_clipped_after_whitening() -> None:
    parameters = {"baseline": "group", "normalize_std": False}
    clipped = token_advantages(ADVANTAGES["grpo"], outcomes(), parameters, whiten=True, clip=0.5)
    plain = token_advantages(ADVANTAGES["grpo"], outcomes(), parameters, whiten=True)
    np.testing.assert_array_equal(clipped, np.clip(plain, -0.5, 0.5))
    assert (clipped != plain).any()


@pytest.mark.parametrize(
    ("wrong", "why"), [(np.zeros(3), "shape"), (np.full(len(REWARDS), np.nan), "not finite")]
)
def test_advantages_of_a_wrong_function_are_refused(wrong: np.ndarray, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        token_advantages(lambda given: wrong, outcomes(), {})
