"""A run whose episodes are agents, on a whole fleet: the engine and the trainer are simulated, all else is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.runs import QUICK, run_on, written
from flotilla_testing.stack import light_stack

AGENT = """
import os
from openai import OpenAI

def play(task):
    client = OpenAI()
    history = list(task["messages"])
    for number in range(2):
        said = client.chat.completions.create(model="any", messages=history, logprobs=True).choices[0]
        history.append({"role": "assistant", "content": said.message.content})
        history.append({"role": "user", "content": f"Check step {number}."})
    short = [{"role": "user", "content": "Sum it up."}, history[-2], history[-1]]
    client.chat.completions.create(model="any", messages=short)
    return {"length": float(len(said.message.content) % 7), "tokens": len(said.logprobs.content)}
"""


def test_agents_of_openai_train_and_their_rewritten_histories_are_branches(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{a}?"}], "answer": str(2 * a)} for a in range(8)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    environment = {"replicas": 1, "isolation": {}}
    parameters = {
        "function": "agent.py:play",
        "folder": str(folder),
        "processes": 4,
        "correct": "last_number",
    }
    plays = {"name": "agent", "parameters": parameters, "max_turns": 4, "episode_tokens": 900}
    run: dict[str, Any] = run_on(
        data, "agents", 2, (4, 2, 16), environment=plays, rewards=[], rollout={"max_staleness": 0}, **QUICK
    )
    model = make_chat_model(tmp_path / "model")
    with light_stack(model, tmp_path, environment=environment, replicas=1) as stack:
        done = stack.run(written(tmp_path, run))
        steps = stack.metrics(done)
    assert len(steps) == 2, steps
    for step in steps:
        assert step["episodes/ended_completed"] == 8 and step["episodes/turns_mean"] == 3.0
        assert step["episodes/branches_history"] == 8
