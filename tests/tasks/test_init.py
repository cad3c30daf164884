"""`flotilla init --tasks` writes files that plan without an error, with tasks that no split shares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_cli.main import main
from flotilla_core.config import RunConfig, load
from flotilla_launch.gpus import VISIBLE
from flotilla_testing.model_folders import write_header, write_tokenizer

pytest.importorskip("reasoning_gym", reason="reasoning_gym is not installed: make test-tasks")
pytestmark = pytest.mark.timeout(300)

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model of a few weights, on a host without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VISIBLE, "")
    model = tmp_path / "model"
    model.mkdir()
    config: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    config |= {"model_type": "qwen3", "num_key_value_heads": 1, "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    shapes = {"embed.weight": [300, 8]} | {f"model.layers.{n}.w.weight": [8, 8] for n in range(3)}
    write_header(model, shapes)
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    write_tokenizer(model, ["\0", "<eos>", *map(chr, range(2, 256))], **settings)
    return tmp_path


def init(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunConfig:
    told(capsys, monkeypatch, "init", "--model", "model", *arguments)
    return load(RunConfig, ["run.yaml"])


def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> dict[str, Any]:
    """Return what a command of `flotilla` tells as JSON."""
    monkeypatch.setattr(sys, "argv", ["flotilla", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_one_task_becomes_a_run_that_asks_for_tags(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = init(capsys, monkeypatch, "--tasks", "reasoning_gym:chain_sum?size=40")
    assert str(run.data.train) == "reasoning_gym:chain_sum?size=40&seed=1"
    assert [(term.reward, term.parameters) for term in run.rewards] == [("reasoning_gym", {})]
    assert "<answer>" in run.data.system_prompt and run.data.apply_chat_template
    assert run.evaluation is not None
    assert str(run.evaluation.data) == "reasoning_gym:chain_sum?size=20&seed=1"
    assert (run.data.split, run.evaluation.split) == ("train", "test")
    tried = told(capsys, monkeypatch, "reward", "test", "run.yaml", "-n", "2")["samples"]
    assert [one["reward"] for one in tried] == [1.0, 0.0, 1.0, 0.0], "each row by its answer, and empty"


def test_several_tasks_become_data_sets_of_one_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ("--tasks", "gcd?size=30", "--tasks", "reasoning_gym:count_bits?level=1&size=30")
    run = init(capsys, monkeypatch, *named)
    assert [str(one.path) for one in run.data.training_sets] == [
        "reasoning_gym:gcd?size=30&seed=1",
        "reasoning_gym:count_bits?level=1&size=30&seed=1",
    ]
    assert run.evaluation is not None
    assert [one.shown for one in run.evaluation.sets_of_data] == ["gcd", "count_bits.1"]
