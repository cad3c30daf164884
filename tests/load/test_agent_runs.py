"""A run whose episodes are agents, on a whole fleet: the engine and the trainer are simulated, all else is real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from accounts import assert_accounted_for

from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.runs import QUICK, run_on, written
from flotilla_testing.stack import Stack, light_stack, wait_until

LIMIT_S = 120.0

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


SIZES = (4, 2, 16)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{a}?"}], "answer": str(2 * a)} for a in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    environment = {"replicas": 1, "isolation": {}}
    sim = {"time_to_first_token_s": 0.3}
    model = make_chat_model(tmp_path / "model")
    with light_stack(model, tmp_path, environment=environment, replicas=1, sim=sim, trainer_s=0.2) as running:
        yield running


def run_file(folder: Path, steps: int) -> Path:
    parameters = {
        "function": "agent.py:play",
        "folder": str(folder / "agents"),
        "processes": 4,
        "correct": "last_number",
    }
    plays = {"name": "agent", "parameters": parameters, "max_turns": 4, "episode_tokens": 900}
    sections = {"environment": plays, "rewards": [], "rollout": {"max_staleness": 0}, **QUICK}
    return written(folder, run_on(folder / "data.jsonl", "agents", steps, SIZES, **sections))


def test_agents_of_openai_train_and_their_shortened_histories_are_branches(
    stack: Stack, tmp_path: Path
) -> None:
    done = stack.run(run_file(tmp_path, 2))
    steps = stack.metrics(done)
    assert len(steps) == 2, steps
    for step in steps:
        assert step["episodes/ended_completed"] == 8 and step["episodes/turns_mean"] == 3.0
        assert step["episodes/branches_history"] == 8
    assert_accounted_for(stack, done["run_id"])


def test_no_episode_is_lost_where_agents_their_service_and_the_coordinator_are_killed(
    stack: Stack, tmp_path: Path
) -> None:
    run = stack.ok("run", "start", str(run_file(tmp_path, 8)))
    for victim in ("agent", "environment-0", "coordinator", "agent"):
        before = len(stack.metrics(run))
        wait_until("a further step", lambda before=before: len(stack.metrics(run)) > before, LIMIT_S)
        if victim == "agent":
            wait_until("agents", lambda: agents_of(stack), LIMIT_S)
            agents_of(stack)[0].kill()
            continue
        agents = agents_of(stack)
        stack.process(victim).kill()
        if victim == "environment-0":
            _, living = psutil.wait_procs(agents, LIMIT_S)
            assert agents and not living, "agents end with their service"
    wait_until("the end", lambda: stack.state(run) not in ("running", "pending", "recovering"), LIMIT_S)
    assert stack.state(run) == "succeeded"
    assert len(stack.metrics(run)) == 8
    assert_accounted_for(stack, run["run_id"])


def agents_of(stack: Stack) -> list[psutil.Process]:
    """Return the processes of agents: what runs the function, in its jail."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        children = stack.process("environment-0").children(recursive=True)
        return [one for one in children if "flotilla_environment.agents.function" in " ".join(one.cmdline())]
    return []
