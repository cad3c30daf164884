"""A tracker reads the files of a run from where it stopped; whatever it does, the run does not notice."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.records import directory as records
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core.config import (
    RunConfig,
    TensorBoardConfig,
    TrackerConfig,
    WandbConfig,
    dump_yaml,
    load_text,
)
from flotilla_core.errors import InvalidConfig
from flotilla_trackers import follow
from flotilla_trackers.feed import Feed, Progress, progress_path
from flotilla_trackers.follow import Trackers, environment_of, tracker_errors
from flotilla_trackers.tracker import COLUMNS, RunFacts, Tracker, rows_of, without_secrets

RUN = {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
SECRET = "0123456789abcdef"


def run_config(*trackers: Any) -> RunConfig:
    return RunConfig.model_validate({**RUN, "trackers": trackers})


class Noted(Tracker):
    """Notes what it is told; raises once at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.facts: RunFacts | None = None
        self.told: list[Any] = []

    def start(self, facts: RunFacts) -> str:
        self.facts = facts
        return "here"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("away")
        self.told.append((step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self.told.append((step, rows))

    def rewind(self, step: int) -> bool:
        self.told.append(("rewind", step))
        return True

    def finish(self, outcome: str) -> None:
        self.told.append(outcome)


def feed(directory: RunDirectory, tracker: Tracker, config: TrackerConfig | None = None) -> None:
    """Give a run that has ended to a tracker."""
    facts = RunFacts("run-1", "run", directory.path, {"steps": 3})
    config = TensorBoardConfig() if config is None else config
    Feed(tracker, facts, config, "tensorboard", lambda **_: None).run(lambda _: "succeeded")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run directory of which no two lines are written in the same millisecond."""
    seconds = itertools.count(1000.0)
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: next(seconds)))
    return RunDirectory.create(tmp_path / "run-1")


def test_a_tracker_gets_every_line_in_the_order_written_at_the_steps_that_are_done(
    directory: RunDirectory,
) -> None:
    directory.write_evaluation(0, "0.0", 0.25, {"eval/pass@4": 0.5})
    directory.write_metrics(0, {"loss": 1.0, "kl": float("nan"), "eval/accuracy": 0.25})
    directory.write_metrics(1, {"loss": 0.5})
    tracker = Noted()
    feed(directory, tracker)
    assert tracker.told == [
        (0, {"eval/accuracy": 0.25, "eval/pass@4": 0.5}),
        (1, {"lineage": 0.0, "loss": 1.0}),
        (2, {"lineage": 0.0, "loss": 0.5}),
        "succeeded",
    ]


def test_a_tracker_that_was_away_gets_the_rest_and_nothing_twice(directory: RunDirectory) -> None:
    for step in range(3):
        directory.write_metrics(step, {"loss": float(step)})
    first = Noted(fails_at=2)
    with pytest.raises(ConnectionError):
        feed(directory, first)
    assert Progress.read(progress_path(directory.path, "tensorboard")).behind(directory.path) == 2
    second = Noted()
    feed(directory, second)
    assert [step for step, _ in (*first.told, *second.told[:-1])] == [1, 2, 3]
    assert first.facts is not None and not first.facts.continued
    assert second.facts is not None and second.facts.continued


def test_a_run_that_goes_back_to_a_checkpoint_rewinds_its_line_once(directory: RunDirectory) -> None:
    for step in range(3):
        directory.write_metrics(step, {})
    directory.write_evaluation(3, "0.3", 0.5)
    # The evaluation of a repeated step is written before its metrics.
    directory.write_metrics(1, {}, lineage=1)
    directory.write_evaluation(3, "1.3", 0.75)
    directory.write_metrics(2, {}, lineage=1)
    tracker = Noted()
    feed(directory, tracker)
    assert tracker.told[4:] == [
        ("rewind", 2),
        (2, {"lineage": 1.0}),
        (3, {"eval/accuracy": 0.75}),
        (3, {"lineage": 1.0}),
        "succeeded",
    ]


def test_a_table_has_the_samples_of_its_step_from_the_best_to_the_worst(directory: RunDirectory) -> None:
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
    feed(directory, tracker, TensorBoardConfig(samples=3, samples_every_steps=2))
    ((_, _), (_, _), (step, rows), _) = tracker.told
    reward = COLUMNS.index("reward")
    assert step == 2 and [row[reward] for row in rows] == [4.0, 2.0, 0.0]
    assert rows[0][:2] == ["6+6=", "answer 4"]


def test_a_table_of_one_row_has_the_best_sample() -> None:
    assert rows_of([{"reward": 0.0}, {"reward": 1.0}], 1)[0][COLUMNS.index("reward")] == 1.0


class Heard:
    """What the coordinator says of a tracker, and a way to wait for it."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, str]] = []
        self._more = asyncio.Event()

    def __call__(self, warning: bool, text: str) -> None:
        self.told.append((warning, text))
        self._more.set()

    async def until(self, words: str) -> None:
        async with asyncio.timeout(50):
            while not any(words in text for _, text in self.told):
                self._more.clear()
                await self._more.wait()

    @property
    def warnings(self) -> list[str]:
        return [text for warning, text in self.told if warning]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, str(Path(__file__).with_name("scripted_tracker.py")))
    monkeypatch.setattr(follow, "COMMAND", command)
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)


async def test_a_tracker_that_refuses_its_key_is_told_once_without_it_and_gets_all_when_it_is_back(
    directory: RunDirectory, scripted: None
) -> None:
    behaviour, taken = directory.path / "behaviour", directory.path / "taken"
    behaviour.write_text("raise")
    directory.write_metrics(0, {"loss": 1.0})
    heard, trackers = Heard(), Trackers()
    trackers.begin("run-1", directory.path, run_config("wandb"), heard)
    await heard.until("takes nothing")
    directory.write_metrics(1, {"loss": 0.5})
    behaviour.write_text("take")
    await heard.until("tracker wandb takes the run again")
    trackers.end("run-1", "succeeded")
    await trackers.close()
    assert len(heard.warnings) == 1 and "PermissionError: the key *** is refused" in heard.warnings[0]
    assert heard.told[0] == (False, "tracker wandb shows the run: http://nowhere/run")
    assert [line.split()[0] for line in taken.read_text().splitlines()] == ["1", "2", "succeeded"]
    logged = (directory.path / "trackers" / "wandb.log").read_text()
    assert "what a client prints" in logged and SECRET not in logged


async def test_a_tracker_that_hangs_is_named_and_what_it_did_not_take_is_counted(
    directory: RunDirectory, scripted: None
) -> None:
    (directory.path / "behaviour").write_text("hang")
    directory.write_metrics(0, {"loss": 1.0})
    config = run_config("wandb")
    process = follow.TrackerProcess("run-1", directory.path, config, config.trackers[0], "wandb")
    heard = Heard()
    running = asyncio.create_task(process.run(heard))
    await heard.until("takes nothing, and the run continues: it hangs")
    process.end("succeeded")
    await running
    assert process.reason == "it hangs" and process.behind() == 1


def test_a_tracker_without_its_client_is_refused_by_name_with_the_command() -> None:
    (error,) = tracker_errors(run_config({"type": "wandb"}))
    assert "trackers names wandb" in error and "pip install 'flotilla-trackers[wandb]'" in error


def test_a_file_of_secrets_reaches_its_tracker_alone_and_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"# the key\nWANDB_API_KEY={SECRET}\n")
    config = WandbConfig(secrets_file=file)
    file.chmod(0o644)
    assert any("secrets_file" in error for error in tracker_errors(run_config(config)))
    file.chmod(0o600)
    environment, names = environment_of(config, {"PATH": "/bin"})
    assert environment["WANDB_API_KEY"] == SECRET and names == ["WANDB_API_KEY"]
    assert SECRET not in dump_yaml(run_config(config))
    file.write_text("no line of this kind\n")
    with pytest.raises(InvalidConfig, match="line 1"):
        environment_of(config, {})


def test_a_proxy_is_that_of_one_tracker() -> None:
    own = {"HTTPS_PROXY": "http://elsewhere:1", "https_proxy": "http://elsewhere:1"}
    assert environment_of(WandbConfig(), own)[0] == own
    assert environment_of(WandbConfig(proxy="none"), own)[0] == {}
    through = environment_of(WandbConfig(proxy="http://here:2"), own)[0]
    assert set(through.values()) == {"http://here:2"} and "HTTPS_PROXY" in through


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{type: wandb, api_key: x}", "api_key is no key of a configuration, which is saved"),
        ("{type: wandb, proxy: 'http://user:pw@proxy:1'}", "carries credentials"),
        ("{type: mlflow, tracking_uri: 'http://user:pw@server'}", "carries credentials"),
        ("{type: wandbb}", "did you mean wandb"),
        ("{type: tensorboard, proxy: none}", "another trackers"),
    ],
)
def test_what_does_not_belong_into_a_tracker_is_refused(section: str, expected: str) -> None:
    text = dump_yaml(run_config()).replace("trackers: []", f"trackers: [{section}]")
    with pytest.raises(InvalidConfig) as caught:
        load_text(RunConfig, text)
    assert expected in str(caught.value) and "pw" not in str(caught.value)


def test_a_bare_name_is_a_tracker_with_defaults_and_no_name_comes_twice() -> None:
    text = dump_yaml(run_config())
    config = load_text(RunConfig, text, overrides=["trackers=[tensorboard, {type: wandb, mode: offline}]"])
    assert config.trackers == (TensorBoardConfig(), WandbConfig(mode="offline"))
    assert load_text(RunConfig, dump_yaml(config)) == config
    with pytest.raises(InvalidConfig, match="wandb is named twice"):
        load_text(RunConfig, text, overrides=["trackers=[wandb, wandb]"])


def test_what_a_tracker_tells_holds_no_secret() -> None:
    environment = {"MY_TOKEN": "abcdef", "HOME": "/home/me", "OTHER": "in-the-file"}
    text = without_secrets(
        "abcdef at /home/me by in-the-file: http://me:pw@host/x", environment, ["in-the-file"]
    )
    assert text == "*** at /home/me by ***: http://***@host/x"
