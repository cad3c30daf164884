"""Advantages of samples that are several steps in an environment, against their formulas in plain Python."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from flotilla_algorithms import Outcomes, Step, compared_share, gae, gigpo, step_reinforce
from flotilla_algorithms.table import ADVANTAGES

TOLERANCE = 1e-9
RNG = np.random.default_rng(7)
SIZES = [4, 1, 5, 3]
GROUP_OF = [group for group, size in enumerate(SIZES) for _ in range(size)]
REWARDS = [float(x) for x in RNG.normal(0, 1, len(GROUP_OF))]
LENGTHS = [int(n) for n in RNG.integers(1, 8, len(GROUP_OF))]


def outcomes() -> Outcomes:
    return Outcomes.of(REWARDS, SIZES, LENGTHS)


def standardised(rewards: list[float], place: int) -> float:
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return (rewards[place] - statistics.fmean(rewards)) / (deviation + 1e-6)


def walk(length: int) -> list[Step]:
    """Steps through few states, so that many of a group meet in one; the whole response is theirs."""
    cuts = sorted({0, length, *RNG.integers(1, length + 1, 2).tolist()})
    return [
        Step(int(RNG.integers(0, 2)), end - begin, float(RNG.normal()))
        for begin, end in itertools.pairwise(cuts)
    ]


@pytest.mark.parametrize(("gamma", "weight"), [(1.0, 1.0), (0.9, 0.5), (0.5, 0.0)])
def test_gigpo_adds_what_a_step_is_worth_among_those_of_its_group_in_its_state(
    gamma: float, weight: float
) -> None:
    walks = [walk(length) for length in LENGTHS]
    expected: list[float] = []
    groups = [
        [r for r, g in zip(REWARDS, GROUP_OF, strict=True) if g == group] for group in range(len(SIZES))
    ]
    whole = [standardised(group, place) for group in groups for place in range(len(group))]

    def worth(sample: int, step: int) -> float:
        return sum(gamma ** (k - step) * walks[sample][k].reward for k in range(step, len(walks[sample])))

    for sample, own in enumerate(walks):
        for number, step in enumerate(own):
            met = [
                (other, k)
                for other in range(len(walks))
                if GROUP_OF[other] == GROUP_OF[sample]
                for k in range(len(walks[other]))
                if walks[other][k].state == step.state
            ]
            place = standardised([worth(*one) for one in met], met.index((sample, number)))
            expected += [whole[sample] + weight * place] * step.tokens
    found = gigpo(outcomes(), walks, gamma=gamma, step_weight=weight)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=TOLERANCE)


@pytest.mark.parametrize(("baseline", "normalize"), [("none", False), ("group", True), ("batch", False)])
def test_step_reinforce_compares_what_steps_and_the_later_ones_earned(baseline: str, normalize: bool) -> None:
    walks = [walk(length) for length in LENGTHS]
    worth = [
        [sum(0.7 ** (k - j) * own[k].reward for k in range(j, len(own))) for j in range(len(own))]
        for own in walks
    ]
    expected: list[float] = []
    for sample, own in enumerate(walks):
        for number, step in enumerate(own):
            met = [
                value
                for other, values in enumerate(worth)
                for value in values
                if baseline == "batch" or GROUP_OF[other] == GROUP_OF[sample]
            ]
            value = worth[sample][number]
            if baseline != "none":
                deviation = statistics.stdev(met) if len(met) > 1 else 0.0
                value = (value - statistics.fmean(met)) / (deviation + 1e-6 if normalize else 1.0)
            expected += [value] * step.tokens
    found = step_reinforce(outcomes(), walks, gamma=0.7, baseline=baseline, normalize_std=normalize)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=TOLERANCE)
    with pytest.raises(ValueError, match="do not belong"):
        step_reinforce(outcomes(), walks[1:])


def test_steps_that_do_not_make_up_their_response_are_refused() -> None:
    given = Outcomes.of([1.0, 0.0], [2], [3, 2])
    with pytest.raises(ValueError, match="sample 1 have 1 tokens, its response has 2"):
        gigpo(given, [[Step("a", 3, 0.0)], [Step("a", 1, 0.0)]])
    with pytest.raises(ValueError, match="1 samples do not belong to 2"):
        gigpo(given, [[Step("a", 3, 0.0)]])


def test_a_turn_ends_where_a_rewritten_history_begins_another_sequence() -> None:
    tokens = [True, True, True, False, True]
    one, several = (
        Outcomes.of([1.0], [1], [5], tokens, [0.5, 0.0, 0.25, 0.0, 0.0], begins=begins)
        for begins in (None, [True, False, True, False, False])
    )
    asked = {"gamma": 0.5, "baseline": "none", "normalize_std": False}
    assert ADVANTAGES["step_reinforce"](one, **asked).tolist() == [-0.25, -0.25, -0.25, 0.0, 1.0]
    assert ADVANTAGES["step_reinforce"](several, **asked).tolist() == [-0.375, -0.375, 0.25, 0.0, 1.0]


def test_each_turn_earns_its_own_reward_and_the_last_one_the_rest() -> None:
    tokens = [True, True, False, True, False, True]
    given = Outcomes.of([1.5], [1], [6], tokens, turn_rewards=[0.0, 0.5, 0.0, -0.25, 0.0, 0.25])
    asked = {"gamma": 0.5, "baseline": "none", "normalize_std": False}
    assert ADVANTAGES["step_reinforce"](given, **asked).tolist() == [0.6875, 0.6875, 0.0, 0.375, 0.0, 1.25]
    assert given.gains().tolist() == [0.0, 0.5, -0.25, 1.25] and given.gains().sum() == given.rewards[0]


def test_the_reward_of_a_turn_whose_last_token_is_not_trained_comes_with_the_rest() -> None:
    given = Outcomes.of([1.5], [1], [3], [True, False, True], turn_rewards=[0.0, 0.5, 0.25])
    assert given.gains().tolist() == [0.0, 1.5]


def test_gae_by_tokens_pays_the_reward_of_a_turn_at_its_last_token() -> None:
    values = [0.0, 0.0, 0.0, 0.0]
    given = Outcomes.of([1.5], [1], [4], values=values, turn_rewards=[0.0, 0.5, 0.0, 0.0])
    found = ADVANTAGES["gae"](given, gamma=0.5, lam=1.0, bootstrap_truncated=True)
    assert found.tolist() == [0.375, 0.75, 0.5, 1.0]


def test_turns_in_equal_states_are_compared_as_steps_of_a_clients_own_are() -> None:
    walks = [walk(length) for length in LENGTHS]
    lengths, trained, rewards, states = [], [], [], []
    for own in walks:
        for number, step in enumerate(own):
            # Context stands between turns, and belongs to none of them.
            trained += [*([False] if number else []), *[True] * step.tokens]
            rewards += [*[0.0] * (step.tokens - 1 + bool(number)), step.reward]
            states += [*[0] * (step.tokens - 1 + bool(number)), 7 - int(str(step.state))]
        lengths.append(sum(step.tokens for step in own) + len(own) - 1)
    totals = [sum(step.reward for step in own) for own in walks]
    given = Outcomes.of(totals, SIZES, lengths, trained, turn_rewards=rewards, turn_states=states)
    asked = {"gamma": 0.9, "step_weight": 0.5, "normalize_std": True}
    found = ADVANTAGES["gigpo"](given, **asked)[given.trained]
    expected = gigpo(Outcomes.of(totals, SIZES, LENGTHS), walks, **asked)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=TOLERANCE)


def test_a_turn_without_a_state_is_compared_with_no_other() -> None:
    asked = {"gamma": 1.0, "step_weight": 1.0, "normalize_std": False}
    alike, unnamed = (
        Outcomes.of([1.0, 0.0], [2], [3, 1], [True, False, True, True], turn_states=[3, 0, last, 3])
        for last in (5, 0)
    )
    assert ADVANTAGES["gigpo"](alike, **asked).tolist() == [1.0, 0.5, 0.5, -1.0]
    assert ADVANTAGES["gigpo"](unnamed, **asked).tolist() == [1.0, 0.5, 0.5, -1.0]
    nothing = Outcomes.of([1.0, 0.0], [2], [3, 1], [True, False, True, True], turn_states=[0, 0, 0, 0])
    assert ADVANTAGES["gigpo"](nothing, **asked).tolist() == [0.5, 0.5, 0.5, -0.5]


def test_the_share_of_turns_that_met_another_one_counts_those_of_the_same_group_and_state() -> None:
    trained = [True, False, True, True, True, True]
    given = Outcomes.of([1.0, 0.0, 0.5, 0.5], [2, 2], [3, 1, 1, 1], trained, turn_states=[3, 0, 5, 3, 3, 0])
    assert compared_share(given) == 2 / 5
    assert compared_share(given.only(np.array([False, True, True, True]))) == 0.0


def test_gae_by_turns_has_one_step_a_turn_and_the_critic_learns_the_return_of_the_turn() -> None:
    values = [0.5, 9.0, 7.0, 0.25, 9.0]
    given = Outcomes.of(
        [1.5],
        [1],
        [5],
        [True, True, False, True, True],
        [0.0, 0.125, 0.0, 0.0, 0.0],
        values=values,
        turn_rewards=[0.0, 0.5, 0.0, 0.0, 0.0],
    )
    asked = {"gamma": 0.5, "lam": 1.0, "bootstrap_truncated": True, "unit": "turn"}
    advantages, returns = gae(given, values, **asked)
    # The second turn earns 1; the first one 0.5 less the penalty of its token, and half of what comes after it.
    assert returns.tolist() == [0.875, 0.875, 7.0, 1.0, 1.0]
    assert advantages.tolist() == [0.375, 0.375, 0.0, 0.75, 0.75]
    assert ADVANTAGES["gae"](given, **asked).tolist() == advantages.tolist()
