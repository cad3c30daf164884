"""A tracker gets what a run directory holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core.config import TensorBoardConfig
from flotilla_testing.tracked_run import Noted, feed
from flotilla_trackers.tracker import COLUMNS


def test_a_tracker_gets_every_line_in_the_order_written_at_the_steps_that_are_done(
    tmp_path: Path,
) -> None:
    directory = RunDirectory.create(tmp_path / "run-1")
    directory.write_evaluation(0, "0.0", 0.25, {"eval/pass@4": 0.5})
    directory.write_metrics(0, {"loss": 1.0, "kl": float("nan"), "eval/accuracy": 0.25})
    directory.write_metrics(1, {"loss": 0.5})
    tracker = Noted()
    feed(directory.path, tracker)
    assert tracker.told == [
        (0, {"eval/accuracy": 0.25, "eval/pass@4": 0.5}),
        (1, {"lineage": 0.0, "loss": 1.0}),
        (2, {"lineage": 0.0, "loss": 0.5}),
        "succeeded",
    ]


def test_a_table_has_the_samples_of_its_step_from_the_best_to_the_worst(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run-1")
    members = [
        RolloutSample(
            sample_id=f"run/0/0/{index}",
            token_ids=np.array([1], dtype=np.int32),
            logprobs=None,
            text=f"answer {index}",
            spans=(),
            reward=float(index),
            generator="generator-0",
        )
        for index in range(5)
    ]
    group = RolloutGroup("run/0/0", "6+6=", np.array([3], dtype=np.int32), members)
    directory.write_samples(Batch(step=1, groups=[group], cursor={}))
    directory.write_metrics(0, {})
    directory.write_metrics(1, {})
    tracker = Noted()
    feed(directory.path, tracker, TensorBoardConfig(samples=3, samples_every_steps=2))
    ((_, _), (_, _), (step, rows), _) = tracker.told
    reward = COLUMNS.index("reward")
    assert step == 2 and [row[reward] for row in rows] == [4.0, 2.0, 0.0]
    assert rows[0][:2] == ["6+6=", "answer 4"]
