"""An environment of the public package of verifiers is played by its adapter, and trains."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packages_of_others import ROOT, python_of
from played_episodes import play_episode

from flotilla_environment.stage import Stage
from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.runs import QUICK, run_on, written
from flotilla_testing.stack import running_stack

pytestmark = pytest.mark.timeout(600)

ADAPTER = ROOT / "adapters" / "verifiers" / "flotilla_verifiers.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the taskset, and the lines of data that the adapter writes for it."""
    shutil.copy(Path(__file__).with_name("reversed_words.py"), tmp_path)
    rows = [*adapter("rows"), "-o", "rows.jsonl", "--count", "4", "--first", "1"]
    subprocess.run(rows, cwd=tmp_path, check=True)
    return tmp_path


def adapter(do: str, *more: str) -> list[str]:
    return [str(python_of("verifiers")), str(ADAPTER), do, "reversed_words", *more]


def agent(folder: Path, *more: str, **parameters: Any) -> dict[str, Any]:
    return {"command": shlex.join(adapter("play", *more)), "folder": str(folder), **parameters}


async def test_an_episode_is_scored_by_the_rewards_of_its_task(stage: Stage, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": "Reverse dog.", "index": 1} and len(rows) == 4
    said = await play_episode(stage, "agent", agent(folder), ["It is god."], info=rows[0], call_limit_s=120.0)
    assert said.heard == [["Reverse dog."]], said.ended
    assert said.ended.rewards == {"reversed": 1.0, "length": pytest.approx(0.03)}


async def test_a_line_without_an_index_and_settings_that_are_none_are_errors(
    stage: Stage, folder: Path
) -> None:
    none = await play_episode(stage, "agent", agent(folder), ["x"], call_limit_s=120.0)
    assert "the column index of the line is None" in none.ended.failure.what and not none.ended.rewards
    few = agent(folder, "--config", '{"taskset": {"words": 2}}')
    far = await play_episode(stage, "agent", few, ["x"], info={"index": 5}, call_limit_s=120.0)
    assert "the taskset has 2 tasks, and the line asks for that of index 5" in far.ended.failure.what


def test_a_run_trains_on_it_with_a_real_engine_and_trainer(folder: Path, readable: list[str]) -> None:
    run = run_on(
        folder / "rows.jsonl",
        "verifiers",
        2,
        (2, 4, 8),
        environment={
            "name": "agent",
            "parameters": agent(folder, processes=2),
            "max_turns": 2,
            "episode_tokens": 200,
            "call_timeout_s": 120.0,
        },
        rewards=[],
        **QUICK,
    )
    description = {
        "name": "verifiers",
        "model": str(make_chat_model(folder / "model")),
        "generator": {"replicas": 1, "dtype": "float32", "max_model_tokens": 256},
        "trainer": {"nproc": 1, "dtype": "float32"},
        "reward": {"replicas": 0},
        "environment": {"replicas": 1, "isolation": {"readable": readable}},
    }
    with running_stack(description, folder) as stack:
        steps = stack.metrics(stack.run(written(folder, run), timeout_s=500))
    assert len(steps) == 2, steps
    for step in steps:
        assert step["episodes/ended_completed"] == 8 and 0.0 <= step["reward/mean"] <= 0.06, step
