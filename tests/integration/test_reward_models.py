"""Reward models on a fleet: one that a run of ours trained and one with another tokenizer give a run its rewards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accounts import assert_accounted_for
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from flotilla_testing.chat_model import HIDDEN, make_chat_model
from flotilla_testing.runs import LEARNS, MADE_UP, QUICK, example_rows, run_on, written
from flotilla_testing.stack import Stack, sim_stack, wait_until

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-4
ENDED = "{prompt}{response}<eos>"
"""What the trained model saw: an answer with its end token."""
NOBODY = {"replicas": 0}


@pytest.fixture(scope="module")
def trained(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run that prefers answers of nines to answers of ones."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "pairs.jsonl"
    pairs = [
        {"prompt": f"{n}+1=", "chosen": "9" * (n % 5 + 1), "rejected": "1" * (n % 4 + 1)} for n in range(40)
    ]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = run_on(data, "judge", 8, (16, 1, 6), optimizer=LEARNS, algorithm={"type": "reward_model"})
    del run["rewards"]
    stack = sim_stack(arithmetic / "model", folder, generator=NOBODY, reward=NOBODY)
    with stack as running:
        finished = running.run(written(folder, run))
        assert finished["state"] == "succeeded", finished["reason"]
        assert running.metrics(finished)[-1]["preference/accuracy"] == 1.0
        shutil.copytree(Path(finished["directory"]) / "model", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template that are not the policy's, and with three labels."""
    folder = make_chat_model(tmp_path_factory.mktemp("other") / "model")
    head = {"score.weight": np.random.default_rng(1).normal(0, 1, (3, HIDDEN)).astype(np.float32)}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def judges(
    arithmetic: Path, trained: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with sim_stack(
        arithmetic / "model",
        tmp_path_factory.mktemp("judges"),
        generator={"sim": {"response_tokens": 1000}, "max_model_tokens": 64},
        reward_models={"nines": {"model": str(trained)}, "polite": {"model": str(other)}},
    ) as running:
        yield running


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    rewards = [
        {"reward": {"model": "nines"}, "template": ENDED},
        {"reward": "exact", "weight": 0.5},
        {"reward": {"model": "polite", "label": 1}, "name": "manners", "weight": 0.1},
    ]
    algorithm = {"type": "grpo", **MADE_UP}
    sections = {"rewards": rewards, "optimizer": LEARNS, "algorithm": algorithm, **QUICK}
    return written(tmp_path, run_on(example_rows(arithmetic), "judged", 3, (4, 4, 6), **sections))


def score(folder: Path, labels: int, label: int, text: str) -> float:
    """Return what transformers says of a text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=labels, dtype=torch.float32
    ).eval()
    model.config.pad_token_id = None
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits[0, label])


def assert_rewards_are_those_of_the_models(sample: dict[str, Any], trained: Path, other: Path) -> None:
    prompt, response = sample["prompt"], sample["response"]
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
    parts = {part["reward"]: part["value"] for part in sample["reward_parts"]}
    assert [*parts] == ["nines", "exact", "manners"]
    nines = score(trained, 1, 0, ENDED.replace("{prompt}", prompt).replace("{response}", response))
    assert parts["nines"] == pytest.approx(nines, abs=TOLERANCE)
    assert parts["manners"] == pytest.approx(score(other, 3, 1, chat), abs=TOLERANCE)
    total = parts["nines"] + 0.5 * parts["exact"] + 0.1 * parts["manners"]
    assert sample["reward"] == pytest.approx(total, abs=TOLERANCE)


def test_a_run_learns_by_the_scores_of_a_model_that_we_trained_and_of_one_with_another_tokenizer(
    judges: Stack, run_file: Path, trained: Path, other: Path
) -> None:
    run = judges.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    assert run["policy_version"] == "0.3"
    for line in judges.metrics(run):
        assert line["reward/std"] > 0 and line["grad_norm"] > 0
        assert line["reward/error_rate"] == line["reward/cut/nines"] == line["reward/cut/polite"] == 0
    samples = judges.ok("samples", run["run_id"], "-n", "100")["samples"]
    assert len(samples) == 48
    for sample in samples[:6]:
        assert_rewards_are_those_of_the_models(sample, trained, other)
    assert not assert_accounted_for(judges, run["run_id"]).dropped
    by_nines = score(trained, 1, 0, "12+3=999<eos>"), score(trained, 1, 0, "12+3=111<eos>")
    assert by_nines[0] > by_nines[1]


def test_a_run_waits_by_name_for_a_reward_model_that_died_and_loses_no_sample(
    judges: Stack, run_file: Path
) -> None:
    run = judges.ok("run", "start", str(run_file), "steps=30", "checkpoint.every_steps=2")
    wait_until("three steps", lambda: len(judges.metrics(run)) >= 3, 120)
    judges.process("reward_model-nines").kill()
    watched = judges.flotilla("run", "watch", run["run_id"], "--json")
    assert watched.json["state"] == "succeeded", watched.json["reason"]
    assert watched.json["policy_version"] == "1.30"
    events = (Path(run["directory"]) / "events.jsonl").read_text()
    assert "the reward_model-nines was lost, the run waits for a gang and continues" in events
    assert not assert_accounted_for(judges, run["run_id"]).dropped


def test_a_plan_names_the_memory_of_each_reward_model_and_a_choice_that_is_missing(
    judges: Stack, run_file: Path
) -> None:
    plan = judges.flotilla("run", "plan", str(run_file))
    assert plan.code == 0, plan.err
    assert "memory of a reward_models.nines rank" in plan.out and "labels: 3" in plan.out
    wrong = 'rewards=[{"reward": {"model": "polite"}}, {"reward": {"model": "absent"}}]'
    refused = judges.flotilla("run", "plan", str(run_file), wrong)
    assert refused.code != 0
    said = refused.out + refused.err
    assert "the model polite has 3 labels" in said and "no reward_models.absent" in said
