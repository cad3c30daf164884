from __future__ import annotations

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.runs.warnings import FIRST_STEPS, SILENT_STEPS, LearningSignal
from flotilla_core.version import Version


def warnings(
    accuracy: float | None, uniform: list[float], std: float = 0.0, spread: float = 0.5
) -> list[str]:
    signal = LearningSignal()
    if accuracy is not None:
        signal.evaluated(accuracy)
    steps = [
        {"reward/std": std, "reward/uniform_groups": share, "advantages/std": spread} for share in uniform
    ]
    told = (signal.step_done(done, metrics) for done, metrics in enumerate(steps, 1))
    return [text for text in told if text]


@pytest.mark.parametrize("accuracy", [None, 0.0])
def test_equal_rewards_from_the_start_are_told_once(accuracy: float | None) -> None:
    (told,) = warnings(accuracy, [1.0, 0.98, 1.0] + [1.0] * 5)
    assert "initial_weights" in told
    assert ("accuracy before is 0" in told) is (accuracy is not None)


def test_a_model_that_can_do_something_is_left_in_peace() -> None:
    assert warnings(0.01, [1.0] * (SILENT_STEPS - 1)) == []


def test_rewards_that_differ_within_groups_are_a_signal() -> None:
    assert warnings(0.0, [0.5] + [1.0] * (SILENT_STEPS - 1)) == []


def test_groups_of_one_are_judged_over_the_whole_step() -> None:
    assert warnings(None, [1.0] * 30, std=0.5) == []
    assert len(warnings(None, [1.0] * (SILENT_STEPS - 1))) == 1


def test_later_steps_and_a_resumed_run_say_nothing_of_the_start() -> None:
    quiet = SILENT_STEPS - 1
    assert warnings(0.0, [0.2] * FIRST_STEPS + [1.0] * quiet) == []
    signal = LearningSignal()
    equal = {"reward/std": 0.0, "reward/uniform_groups": 1.0}
    assert not any(signal.step_done(done, equal) for done in range(FIRST_STEPS + 1, FIRST_STEPS + 1 + quiet))


def test_supervised_steps_have_no_rewards_to_judge() -> None:
    signal = LearningSignal()
    assert not any(signal.step_done(done, {"loss": 1.0}) for done in range(1, 6))


@pytest.mark.parametrize("accuracy", [None, 0.0, 0.7])
def test_rewards_that_stay_equal_are_told_once_for_each_time_they_do(accuracy: float | None) -> None:
    """Whatever came before: a task that is solved, or a reward that is broken, from then on teaches nothing."""
    told = warnings(accuracy, [0.4] * 5 + [1.0] * 25 + [0.9] + [1.0] * 12)
    assert len(told) == 2
    assert all("no group had two different rewards in the last 10 steps" in text for text in told)


def test_groups_of_equal_rewards_teach_nothing_where_groups_alone_are_compared() -> None:
    """Each prompt is always right or always wrong: the rewards differ, the advantages do not."""
    assert len(warnings(0.7, [1.0] * SILENT_STEPS, std=0.5, spread=0.0)) == 1
    assert warnings(0.7, [1.0] * SILENT_STEPS, std=0.5, spread=0.5) == []


def test_a_client_that_sends_advantages_of_its_own_learns_without_rewards() -> None:
    def said(norm: float) -> list[str]:
        signal = LearningSignal()
        signal.evaluated(0.5)
        step = {"reward/std": 0.0, "reward/uniform_groups": 1.0, "grad_norm": norm}
        return [text for done in range(1, 13) if (text := signal.step_done(done, step))]

    assert len(said(0.0)) == 1 and said(0.3) == []


@pytest.mark.parametrize(
    ("uniform", "steps_done", "advised"),
    [
        ([1.0] * 4, 4, True),
        ([1.0] * 4, 40, False),  # resumed: of the steps before nothing is known
        ([0.5] + [1.0] * 4, 5, False),
        ([0.5] + [1.0] * 12, 13, True),
        ([], 0, False),
    ],
)
def test_a_run_that_learned_nothing_ends_with_that_advice(
    uniform: list[float], steps_done: int, advised: bool
) -> None:
    signal = LearningSignal()
    for done, share in enumerate(uniform, 1):
        signal.step_done(done, {"reward/std": 0.0, "reward/uniform_groups": share, "advantages/std": 0.0})
    assert ("nothing is learned" in signal.verdict(steps_done)) is advised


def test_a_run_of_equal_rewards_succeeds_with_a_word_about_it() -> None:
    seen: list[run_pb2.RunEvent] = []
    shown = RunStatus(run_pb2.Run(run_id="run", total_steps=12), EventLog(seen.append))
    same = {"reward/std": 0.0, "reward/mean": 1.0, "reward/uniform_groups": 1.0, "advantages/std": 0.0}
    for step in range(1, 13):
        shown.step_done(step, Version(0, step), {"time/step_s": 1.0, **same})
    shown.set_state(run_pb2.RUN_STATE_SUCCEEDED)
    told = [event.notice.text for event in seen if event.WhichOneof("event") == "notice"]
    assert [text[:23] for text in told] == ["there is almost nothing", "no group had two differ"]
    assert "in the last 12 steps (mean reward 1): nothing is learned" in seen[-1].run.advice
