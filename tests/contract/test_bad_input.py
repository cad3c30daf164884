"""Whatever is wrong ends in one clear message and a non-zero exit; nothing hangs, nothing half-started stays."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_TRAINER
from flotilla_testing.stack import Stack, accepting_trainer, wait_until

pytestmark = pytest.mark.timeout(120)

USAGE = 2
FAILED_RUN = 1
RunFile = Callable[..., Path]


@pytest.fixture
def run_file(tiny_run: Callable[[str, int], dict[str, Any]], tmp_path: Path) -> RunFile:
    """A run of one small step, with changes by dotted key."""

    def written(**changes: Any) -> Path:
        run = tiny_run("bad-input", 1)
        for key, value in changes.items():
            section, *path = key.split("__")
            target = run
            for part in path:
                target, section = target.setdefault(section, {}), part
            target[section] = value
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        return file

    return written


def test_good_input_passes(fleet: Stack, run_file: RunFile) -> None:
    run = fleet.run(run_file())
    assert run["state"] == "succeeded", run["reason"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollot": {}}, ["rollot", "rollout", "run.yaml:"]),
        ({"rollout__promts_per_step": 4}, ["promts_per_step", "prompts_per_step"]),
        ({"steps": "many"}, ["steps", "integer"]),
        ({"rollout__samples_per_prompt": 1}, ["samples_per_prompt", "grpo", "2 or more"]),
        ({"data__train": "/nowhere/train.jsonl"}, ["/nowhere/train.jsonl"]),
        ({"initial_weights": "/nowhere/model"}, ["/nowhere/model"]),
        ({"rewards": [{"reward": "/nowhere/reward.py:reward"}]}, ["/nowhere/reward.py"]),
        ({"optimizer__warmup_updates": 9, "optimizer__schedule": "linear"}, ["warmup_updates"]),
    ],
    ids=["section", "key", "type", "group-of-one", "data", "weights", "reward-file", "schedule"],
)
def test_wrong_run_is_refused_before_anything_starts(
    fleet: Stack, run_file: RunFile, changes: dict[str, Any], told: list[str]
) -> None:
    before = run_folders(fleet)
    outcome = fleet.flotilla("run", "start", str(run_file(**changes)), "--wait")
    assert outcome.code == USAGE, outcome.err
    for words in told:
        assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert run_folders(fleet) == before


def test_empty_data_set_is_refused(fleet: Stack, run_file: RunFile, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    outcome = fleet.flotilla("run", "start", str(run_file(data__train=str(empty))))
    assert outcome.code == USAGE
    assert "empty.jsonl" in outcome.err


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('broken on purpose')", "broken on purpose"),
        ("return float('nan')", "nan"),
        ("return 'good'", "good"),
        ("while True: pass", "0.5 s"),
    ],
    ids=["raises", "nan", "text", "never-returns"],
)
def test_broken_reward_fails_the_run_and_is_never_a_score(
    fleet: Stack, run_file: RunFile, tmp_path: Path, body: str, told: str
) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text(f"def reward(prompt, response, answer, info):\n    {body}\n")
    terms = [{"reward": f"{reward}:reward", "timeout_s": 0.5}]
    outcome = fleet.flotilla("run", "start", str(run_file(rewards=terms)), "--wait", "--json")
    assert outcome.code == FAILED_RUN
    assert outcome.json["state"] == "failed"
    assert told in outcome.json["reason"].lower()


def test_missing_model_folder_starts_nothing(tmp_path: Path) -> None:
    outcome = up(tmp_path, model="/nowhere/model")
    assert outcome.code != 0
    assert "/nowhere/model" in outcome.err
    assert nothing_runs_below(tmp_path)


def test_taken_port_names_the_port_and_starts_nothing(arithmetic: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        no_generator = {"engine": "sim", "replicas": 0}
        outcome = up(tmp_path, model=str(arithmetic / "model"), bind={"port": port}, generator=no_generator)
    assert outcome.code != 0
    assert str(port) in outcome.err
    assert nothing_runs_below(tmp_path)


def test_service_that_dies_at_start_shows_its_last_words(arithmetic: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken-model"
    broken.mkdir()
    (broken / "tokenizer.json").write_bytes((arithmetic / "model" / "tokenizer.json").read_bytes())
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    outcome = up(tmp_path, model=str(broken))
    assert outcome.code != 0
    assert "config.json" in outcome.err or "no-such-architecture" in outcome.err
    assert nothing_runs_below(tmp_path)


def test_trainer_with_another_tokenizer_is_refused(
    fleet: Stack, arithmetic: Path, run_file: RunFile, tmp_path: Path
) -> None:
    """A loop has the trainer of the fleet and its generator, so that a run without one gets the other trainer."""
    other = tmp_path / "other-model"
    other.mkdir()
    for file in (arithmetic / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    pairs, of_pairs = tmp_path / "pairs.jsonl", tmp_path / "pairs.yaml"
    pairs.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    described = {"name": "pairs", "steps": 1, "algorithm": {"type": "dpo"}, "data": {"train": str(pairs)}}
    of_pairs.write_text(yaml.safe_dump(described | {"rollout": {"prompts_per_step": 1}}))
    stack_file = tmp_path / "stack.yaml"
    stack_file.write_text(yaml.safe_dump({**yaml.safe_load(fleet.file.read_text()), "model": str(other)}))
    with (
        fleet.client() as client,
        client.open_loop(run_file()),
        accepting_trainer("trainer-1", stack_file, tmp_path),
    ):
        wait_until("the other trainer", lambda: len(fleet.holders(SERVICE_KIND_TRAINER)) == 2)
        run = fleet.run(of_pairs)
    assert run["state"] == "failed"
    assert "tokenizer" in run["reason"]


def run_folders(fleet: Stack) -> set[Path]:
    return set((fleet.directory / "runs").glob("*"))


def up(directory: Path, **stack: Any) -> Any:
    """`flotilla up` with a stack of its own; taken down again unless it was refused."""
    file = directory / "stack.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "bad",
                "state_dir": str(directory),
                "generator": {"engine": "sim"},
                "trainer": {"replicas": 0},
                "reward": {"replicas": 0},
                **stack,
            }
        )
    )
    running = Stack(file, directory / "bad")
    with ExitStack() as unless_refused:
        unless_refused.callback(running.flotilla, "down")
        outcome = running.flotilla("up", timeout_s=100)
        if outcome.code != 0:
            unless_refused.pop_all()
    return outcome


def nothing_runs_below(directory: Path) -> bool:
    """No process was left that was started with a file of this directory."""
    return not [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in argument for argument in process.info["cmdline"] or ())
    ]
