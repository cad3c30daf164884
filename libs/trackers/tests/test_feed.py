"""A tracker reads the files of a run from where it stopped, and gets every line at its step, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla_testing.tracked_run import Noted, RunFiles, feed
from flotilla_trackers.feed import Progress, progress_path
from flotilla_trackers.tracker import COLUMNS, rows_of, without_secrets


def test_a_tracker_that_was_away_gets_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    for step in range(3):
        run.metrics(step, loss=step)
    first = Noted(fails_at=2)
    with pytest.raises(ConnectionError):
        feed(tmp_path, first)
    assert Progress.read(progress_path(tmp_path, "tensorboard")).behind(tmp_path) == 2
    second = Noted()
    feed(tmp_path, second)
    assert [step for step, _ in (*first.told, *second.told[:-1])] == [1, 2, 3]
    assert first.facts is not None and not first.facts.continued
    assert second.facts is not None and second.facts.continued


def test_a_run_that_goes_back_to_a_checkpoint_rewinds_its_line_once(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    for step in range(3):
        run.metrics(step)
    run.evaluation(3, 0.5)
    # The evaluation of a repeated step is written before its metrics.
    run.metrics(1, lineage=1)
    run.evaluation(3, 0.75)
    run.metrics(2, lineage=1)
    tracker = Noted()
    feed(tmp_path, tracker)
    assert tracker.told[4:] == [
        ("rewind", 2),
        (2, {"lineage": 1.0}),
        (3, {"eval/accuracy": 0.75}),
        (3, {"lineage": 1.0}),
        "succeeded",
    ]


def test_a_table_of_one_row_has_the_best_sample() -> None:
    assert rows_of([{"reward": 0.0}, {"reward": 1.0}], 1)[0][COLUMNS.index("reward")] == 1.0


def test_what_a_tracker_tells_holds_no_secret() -> None:
    environment = {"MY_TOKEN": "abcdef", "HOME": "/home/me", "OTHER": "in-the-file"}
    text = without_secrets(
        "abcdef at /home/me by in-the-file: http://me:pw@host/x", environment, ["in-the-file"]
    )
    assert text == "*** at /home/me by ***: http://***@host/x"
