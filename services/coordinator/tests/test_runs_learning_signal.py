from __future__ import annotations

import pytest

from flotilla_coordinator.runs.warnings import FIRST_STEPS, LearningSignal


def warnings(accuracy: float | None, uniform: list[float], std: float = 0.0) -> list[str]:
    signal = LearningSignal()
    if accuracy is not None:
        signal.evaluated(accuracy)
    steps = [{"reward/std": std, "reward/uniform_groups": share} for share in uniform]
    told = (signal.step_done(done, metrics) for done, metrics in enumerate(steps, 1))
    return [text for text in told if text]


@pytest.mark.parametrize("accuracy", [None, 0.0])
def test_equal_rewards_from_the_start_are_told_once(accuracy: float | None) -> None:
    (told,) = warnings(accuracy, [1.0, 0.98, 1.0] + [1.0] * 5)
    assert "initial_weights" in told
    assert ("accuracy before is 0" in told) is (accuracy is not None)


def test_a_model_that_can_do_something_is_left_in_peace() -> None:
    assert warnings(0.01, [1.0] * 10) == []


def test_rewards_that_differ_within_groups_are_a_signal() -> None:
    assert warnings(0.0, [0.5] + [1.0] * 10) == []


def test_groups_of_one_are_judged_over_the_whole_step() -> None:
    assert warnings(None, [1.0] * 10, std=0.5) == []
    assert len(warnings(None, [1.0] * 10)) == 1


def test_later_steps_and_a_resumed_run_say_nothing_of_the_start() -> None:
    assert warnings(0.0, [0.2] * FIRST_STEPS + [1.0] * 10) == []
    signal = LearningSignal()
    equal = {"reward/std": 0.0, "reward/uniform_groups": 1.0}
    assert not any(signal.step_done(done, equal) for done in range(FIRST_STEPS + 1, 20))


def test_supervised_steps_have_no_rewards_to_judge() -> None:
    signal = LearningSignal()
    assert not any(signal.step_done(done, {"loss": 1.0}) for done in range(1, 6))
