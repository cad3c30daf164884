"""A training trace has each sampled token once, after exactly what the policy had read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_coordinator.ledger.records import Branch, Episode
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.records.traces import traces
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_core.version import Version

PROMPT = np.array([1, 2], np.int32)


def traced(folder: Path, *samples: RolloutSample) -> dict[str, Any]:
    group = RolloutGroup("run/0/0", "a prompt", PROMPT, list(samples), answer="7")
    RolloutRecord(folder, "run", 1.0, "digest").write(Batch(0, [group], {}), Version(0, 0))
    return dict(traces(folder, {one.sample_id for one in samples}))


def sample(name: str, tokens: list[int], **changes: Any) -> RolloutSample:
    logprobs = np.array([-0.5 * token for token in tokens], np.float32)
    return RolloutSample(name, np.array(tokens, np.int32), logprobs, "said", reward=0.5, **changes)


def test_a_single_response_is_one_turn(tmp_path: Path) -> None:
    found = traced(tmp_path, sample("run/0/0/0", [5, 6]), sample("run/0/0/1", []))
    (turn,) = found["run/0/0/0"]["turns"]
    assert turn["prompt_token_ids"] == [1, 2] and turn["completion_token_ids"] == [5, 6]
    assert turn["per_token_logps"] == [-2.5, -3.0] and turn["loss_mask"] == [0, 0, 1, 1]
    assert turn["request"] == {"prompt": "a prompt"} and turn["response"] == {"content": "said"}
    assert turn["metadata"]["reward"] == 0.5 and turn["metadata"]["sample_id"] == "run/0/0/0"
    assert found["run/0/0/1"] == {"schema_version": 1, "turns": []}


def test_turns_of_an_episode_follow_what_was_read_in_their_own_sequence(tmp_path: Path) -> None:
    branches = (Branch(0, PROMPT), Branch(4, np.array([9], np.int32)))
    trained = np.array([True, False, True, True, False, True])
    asked, turn = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "turn": 1}
    transcript = json.dumps([{"tools": []}, asked, turn, asked, turn | {"turn": 2}])
    played = Episode("completed", 3, (), transcript, branches)
    found = traced(tmp_path, sample("run/0/0/0", [3, 4, 5, 6, 7, 8], trained=trained, episode=played))
    turns = found["run/0/0/0"]["turns"]
    assert [(turn["prompt_token_ids"], turn["completion_token_ids"]) for turn in turns] == [
        ([1, 2], [3]),
        ([1, 2, 3, 4], [5, 6]),
        ([9, 7], [8]),
    ]
    assert [turn["metadata"]["sequence"] for turn in turns] == [0, 0, 1]
    assert all(
        len(t["loss_mask"]) == len(t["prompt_token_ids"]) + len(t["completion_token_ids"]) for t in turns
    )
    assert len({turn["node_id"] for turn in turns}) == 3
    assert turns[0]["request"] == {"messages": [{"role": "user", "content": "?"}]}
