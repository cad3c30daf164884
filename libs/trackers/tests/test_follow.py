"""Whatever a tracker does, the run does not notice: its process is followed, started again and told of once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import RunConfig, WandbConfig, dump_yaml
from flotilla_core.errors import InvalidConfig
from flotilla_testing.tracked_run import RunFiles
from flotilla_trackers import follow
from flotilla_trackers.environment import environment_of, tracker_errors
from flotilla_trackers.follow import Trackers

RUN = {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
SECRET = "0123456789abcdef"


def run_config(*trackers: Any) -> RunConfig:
    return RunConfig.model_validate({**RUN, "trackers": trackers})


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
    tmp_path: Path, scripted: None
) -> None:
    behaviour, taken = tmp_path / "behaviour", tmp_path / "taken"
    behaviour.write_text("raise")
    run = RunFiles(tmp_path)
    run.metrics(0, loss=1.0)
    heard, trackers = Heard(), Trackers()
    trackers.begin("run-1", tmp_path, run_config("wandb"), heard)
    await heard.until("takes nothing")
    run.metrics(1, loss=0.5)
    behaviour.write_text("take")
    await heard.until("tracker wandb takes the run again")
    trackers.end("run-1", "succeeded")
    await trackers.close()
    assert len(heard.warnings) == 1 and "PermissionError: the key *** is refused" in heard.warnings[0]
    assert heard.told[0] == (False, "tracker wandb shows the run: http://nowhere/run")
    assert [line.split()[0] for line in taken.read_text().splitlines()] == ["1", "2", "succeeded"]
    logged = (tmp_path / "trackers" / "wandb.log").read_text()
    assert "what a client prints" in logged and SECRET not in logged


async def test_a_tracker_that_hangs_is_named_and_what_it_did_not_take_is_counted(
    tmp_path: Path, scripted: None
) -> None:
    (tmp_path / "behaviour").write_text("hang")
    RunFiles(tmp_path).metrics(0, loss=1.0)
    config = run_config("wandb")
    process = follow.TrackerProcess("run-1", tmp_path, config, config.trackers[0], "wandb")
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
