"""What a run file may say about prompts, samples and evaluations."""

from __future__ import annotations

import pytest

from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import InvalidConfig

RUN = "name: run\nsteps: 3\nrewards: [{reward: exact}]\n"


def load(text: str) -> RunConfig:
    data = "" if "data:" in text.split("evaluation")[0] else "data: {train: /x.jsonl}\n"
    return load_text(RunConfig, RUN + data + text, source="run.yaml")


def test_several_answers_to_a_held_out_prompt_need_a_temperature() -> None:
    with pytest.raises(InvalidConfig, match="greedy answers to one prompt are all equal"):
        load("evaluation: {data: e.jsonl, samples_per_prompt: 4}\n")
    evaluation = load("evaluation: {data: e.jsonl, samples_per_prompt: 4, temperature: 0.8}\n").evaluation
    assert evaluation is not None and evaluation.samples_per_prompt == 4


def test_pairs_are_ranked_without_a_temperature() -> None:
    text = "evaluation: {data: e.jsonl, temperature: 1.0}\nalgorithm: {type: dpo}\nrewards: []\n"
    with pytest.raises(InvalidConfig, match="pairs are ranked and nothing is generated"):
        load_text(RunConfig, f"name: run\nsteps: 3\ndata: {{train: /x.jsonl}}\n{text}", source="run.yaml")
