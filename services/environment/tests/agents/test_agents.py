"""Agents of users, unchanged, play episodes: real processes, and the real clients of OpenAI and Anthropic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT = """
import json, os
from openai import OpenAI

task = json.loads(os.environ["FLOTILLA_TASK"])
assert "answer" not in task and task["info"] == {"level": 2} and task["seed"] == 3
history = list(task["messages"])
client = OpenAI()
for _ in range(2):
    said = client.chat.completions.create(model="gpt-any", messages=history).choices[0].message
    history += [said.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
"""


def agent(folder: Path, text: str) -> str:
    (folder / "agent.py").write_text(text)
    return "python agent.py"


async def test_an_agent_of_openai_chat_plays_an_episode_and_its_last_turn_is_judged(
    caller: Any, tmp_path: Path
) -> None:
    answers = iter(["Perhaps 41.", "It is 42."])
    played = await caller.plays(lambda _: next(answers), command=agent(tmp_path, CHAT), correct="last_number")
    assert (played.ending, dict(played.ended.rewards)) == ("completed", {"correct": 1.0}), played.ended
    assert played.said == [["What is 6 x 7?"], ["Are you sure?"]]
    assert not any(one.afresh or one.thread or one.tokens for one in played.asked)
