"""A run of sft on chats, from a file in OpenAI's layout to the loss of a real gang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.plain_torch import logprobs, plain_model
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)
NUMBERS = range(10, 14)


def says(role: str, content: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def chat(number: int) -> list[dict[str, Any]]:
    return [
        says("user", f"{number}+1="),
        says("assistant", str(number + 1)),
        says("user", f"{number}+2="),
        says("assistant", str(number), weight=0),
        says("user", f"{number}+3="),
        says("assistant", str(number + 3)),
    ]


def test_the_turns_of_the_assistant_are_what_a_run_learns(
    gangs: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    data, file = tmp_path / "chats.jsonl", tmp_path / "run.yaml"
    data.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in NUMBERS))
    run_of_chats = {
        "name": "chats",
        "steps": 1,
        "algorithm": {"type": "sft"},
        "data": {"train": str(data)},
        "rollout": {"prompts_per_step": len(NUMBERS)},
        "export_final": False,
    }
    file.write_text(json.dumps(run_of_chats))
    run = gangs.run(file)
    assert run["state"] == "succeeded", run["reason"]
    (step,) = gangs.metrics(run)

    tokenizer, policy = Tokenizer.load(arithmetic / "model"), plain_model(arithmetic / "model")
    learned = []
    for messages in map(chat, NUMBERS):
        for place in (1, 5):
            prompt = tokenizer.render_chat(messages[:place])
            turn = tokenizer.encode(messages[place]["content"])
            tokens = np.array(tokenizer.encode(prompt)), np.array([*turn, tokenizer.eos_id])
            learned.append(logprobs(policy, *tokens))
    every = torch.cat(learned)
    assert step["tokens/trained"] == len(every) == len(NUMBERS) * 2 * 3
    assert step["loss"] == pytest.approx(-every.mean().item(), abs=1e-3)
