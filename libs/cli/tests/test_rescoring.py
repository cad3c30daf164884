"""`flotilla reward score`: recorded samples get the rewards of other terms, without a fleet, a model or a generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flotilla_coordinator.data.recorded import open_recorded
from flotilla_coordinator.ledger.records import Branch, Episode, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.records.rollouts import RolloutRecord, schema
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core.version import Version

Command = Callable[..., tuple[int, str, str]]
REWARDS = """
def longer(prompt, response, answer, info):
    return float(len(response)) * info["factor"]

def best(completions, group_ids=None, **columns):
    return [float(len(text) == max(map(len, completions))) for text in completions]

def blind(prompt, response, answer, info):
    return 1 / (len(response) - 2)
"""
OLD = {"reward", "reward_parts", "reward_terms", "greedy_reward"}


def sample(name: str, text: str, **changes: Any) -> RolloutSample:
    tokens = len(text)
    return RolloutSample(
        sample_id=name,
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        text=text,
        spans=(TokenSpan(Version(0, 3), 0, tokens),),
        **{"reward": 0.25, "reward_terms": (0.25,), "greedy_reward": 1.0} | changes,
    )


@pytest.fixture
def record(flotilla: Command, tmp_path: Path) -> Path:
    """Two groups of two samples each."""
    Path("mine.py").write_text(REWARDS)
    prompt = np.array([1, 2], np.int32)
    groups = [
        RolloutGroup(f"run/0/{at}", f"{at}+1=", prompt, samples, answer=str(at + 1), info={"factor": at})
        for at, samples in enumerate(
            ([sample("a", "1"), sample("b", "12")], [sample("c", "2"), sample("d", "345")])
        )
    ]
    RolloutRecord(tmp_path / "rollouts", "run", 1.0, "digest").write(Batch(3, groups, {}), Version(0, 3))
    return tmp_path / "rollouts"


def scored(flotilla: Command, record: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    ended, out, err = flotilla("reward", "score", str(record), *arguments, "-o", "new.parquet", "--json")
    assert ended == code, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_samples_get_other_rewards_and_keep_all_other_columns(flotilla: Command, record: Path) -> None:
    found = scored(flotilla, record, "exact")
    assert found["samples"] == 4 and found["changed"] == 4
    assert (found["mean_before"], found["mean_after"]) == (0.25, 0.5)
    before, after = (pq.read_table(place).to_pylist() for place in (record, "new.parquet"))
    assert [row["reward"] for row in after] == [1.0, 0.0, 1.0, 0.0]
    assert after[0]["reward_parts"] == [{"reward": "exact", "value": 1.0}]
    assert [row["greedy_reward"] for row in after] == [None] * 4
    for old, new in zip(before, after, strict=True):
        assert {name: old[name] for name in old if name not in OLD} == {
            name: new[name] for name in new if name not in OLD
        }
    assert pq.read_table("new.parquet").schema.equals(schema())
    assert open_recorded(Path("new.parquet"), "train").rows == 2


def test_functions_of_rows_and_of_groups_are_weighed_as_a_run_weighs_them(
    flotilla: Command, record: Path
) -> None:
    Path("run.yaml").write_text(
        "name: new\nsteps: 1\ndata: {train: nothing.jsonl}\n"
        "rewards: [{reward: 'mine.py:longer', weight: 0.5}, {reward: 'mine.py:best'}]\n"
    )
    scored(flotilla, record, "run.yaml")
    rows = pq.read_table("new.parquet").to_pylist()
    assert [row["reward_terms"] for row in rows] == [[0, 0], [0, 1], [1, 0], [3, 1]]
    assert [row["reward"] for row in rows] == [0, 1, 0.5, 2.5]


def test_a_sample_that_cannot_be_scored_is_left_out_and_told(flotilla: Command, record: Path) -> None:
    found = scored(flotilla, record, "mine.py:blind", code=1)
    assert found["samples"] == 3
    ((why, count),) = found["left_out"].items()
    assert "division by zero" in why and count == 1
    assert [row["sample_id"] for row in pq.read_table("new.parquet").to_pylist()] == ["a", "c", "d"]


def test_the_rewards_of_an_environment_stay_part_of_an_episode(flotilla: Command, tmp_path: Path) -> None:
    prompt = np.array([1], np.int32)
    played = Episode("completed", 1, (), "[]", (Branch(0, prompt),))
    given = (TermVerdict("environment", Said.SCORED, 0.75), TermVerdict("old", Said.SCORED, 0.5))
    one = sample("a", "1", reward=1.25, episode=played, verdicts=given)
    group = RolloutGroup("run/0/0", "0+1=", prompt, [one], answer="1")
    RolloutRecord(tmp_path, "run", 1.0, "digest").write(Batch(0, [group], {}), Version(0, 0))
    scored(flotilla, tmp_path / "step-000000.parquet", "exact")
    (row,) = pq.read_table("new.parquet").to_pylist()
    assert row["reward"] == 1.75
    assert [part["reward"] for part in row["reward_parts"]] == ["environment", "exact"]


def test_a_file_that_exists_is_kept_and_a_run_without_a_record_is_named(
    flotilla: Command, record: Path
) -> None:
    scored(flotilla, record, "exact")
    code, _, err = flotilla("reward", "score", str(record), "exact", "-o", "new.parquet")
    assert code == 2 and "would be overwritten" in err
    scored(flotilla, record, "mine.py:longer", "--force")
    code, _, err = flotilla("reward", "score", "no-such-run", "exact", "-o", "other.parquet")
    assert code != 0 and not Path("other.parquet").exists()


def test_prompts_are_no_recorded_samples(flotilla: Command, record: Path) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    code, _, err = flotilla("reward", "score", "prompts.jsonl", "exact", "-o", "new.parquet")
    assert code == 2 and "no recorded sample" in err and not Path("new.parquet").exists()
