"""Agents of users, unchanged, play episodes: real processes, and the real clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_environment.catalog import problem

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


RAW = """
import json, os, signal, sys, time, urllib.request

def asks(*texts):
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return sends("/v1/chat/completions", {"model": "any", "messages": messages})["choices"][0]["message"]["content"]

def sends(path, body):
    key = os.environ.get("FLOTILLA_SESSION_KEY") or os.environ["OPENAI_API_KEY"]
    headers = {"authorization": "Bearer " + key}
    url = os.environ["FLOTILLA_SESSION_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as said:
        return json.load(said)

"""


async def test_a_function_is_called_with_the_task_and_returns_rewards(caller: Any, tmp_path: Path) -> None:
    agent(tmp_path, RAW + "def play(task):\n    return {'length': len(asks(task['messages'][0]['content']))}")
    played = await caller.plays(lambda _: "four", function="agent.py:play")
    assert dict(played.ended.rewards) == {"length": 4.0} and played.said == [["What is 6 x 7?"]]
    agent(tmp_path, RAW + "async def play(task):\n    asks('One?')")
    played = await caller.plays(lambda _: "yes", function="agent.py:play")
    assert played.ending == "completed" and not played.ended.rewards


@pytest.mark.parametrize("processes", [0, 1])
async def test_what_a_function_raises_is_an_error_with_its_line_and_ends_its_episode_alone(
    caller: Any, tmp_path: Path, processes: int
) -> None:
    text = RAW + "def play(task):\n    1 / (asks('One?') == 'yes')"
    agent(tmp_path, text)
    options: dict[str, Any] = {"function": "agent.py:play", "processes": processes}
    failed = await caller.plays(lambda _: "no", **options)
    assert failed.ending == "error" and not failed.ended.rewards
    assert "ZeroDivisionError: division by zero" in failed.ended.failure.what
    assert failed.ended.failure.where == f"{tmp_path}/agent.py:{text.count(chr(10)) + 1}"
    over = await caller.plays(lambda _: "yes", turns=0, **options)
    assert over.ending == "max_turns", "it is refused a turn, and raises for that"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit(-1)", "the agent exited with status 255"),
        ("asks('One?'); sends('/rewards', {'a': 1}); sys.exit(3)", "the agent exited with status 3"),
        ("asks('One?'); sends('/rewards', {'a': 1}); 1 / 0", "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("sys.stderr.write('x' * 10**5 + '\\nlast words\\n'); sys.exit(1)", "last words"),
        ("sys.stderr.write('x' * 10**7); sys.exit(1)", "bytes that a worker printed are left out"),
    ],
)
async def test_an_agent_that_fails_is_an_error_with_its_last_words_and_never_a_reward(
    caller: Any, tmp_path: Path, code: str, told: str
) -> None:
    played = await caller.plays(lambda _: "yes", command=agent(tmp_path, RAW + code))
    assert played.ending == "error" and not played.ended.rewards
    assert told in played.ended.failure.what and len(played.ended.failure.why) < 5000


async def test_rewards_of_a_function_that_are_refused_are_an_error_that_names_them(
    caller: Any, tmp_path: Path
) -> None:
    agent(tmp_path, RAW + "def play(task):\n    return {'turns': 1.0, 'a': 1.0}")
    played = await caller.plays(lambda _: "yes", function="agent.py:play")
    assert played.ending == "error" and not played.ended.rewards
    assert "play returned rewards that are refused: 'turns' is no name" in played.ended.failure.what


async def test_agents_that_come_by_themselves_may_come_before_their_run(
    staged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_AGENTS_KEY", "a key of at least sixteen")
    monkeypatch.setattr("flotilla_environment.gateway.server.TASK_LIMIT_S", 0.1)
    async with staged(tmp_path) as caller, aiohttp.ClientSession() as http:
        shown = {"authorization": "Bearer a key of at least sixteen"}
        async with http.get(f"{await caller.stage.agents.gateway.start()}/tasks/next", headers=shown) as said:
            assert said.status == 204
        code = "assert 'FLOTILLA_AGENTS_KEY' not in os.environ"
        played = await caller.plays(lambda _: "yes", command=agent(tmp_path, RAW + code))
        assert played.ending == "completed", "the key is not for agents that the service starts"


async def test_a_command_that_is_not_there_is_an_error(caller: Any) -> None:
    played = await caller.plays(lambda _: "yes", command="nowhere --at all")
    assert played.ending == "error" and "nowhere cannot be run" in played.ended.failure.what


async def test_an_agent_that_crashes_for_want_of_turns_has_its_rewards(caller: Any, tmp_path: Path) -> None:
    command = agent(tmp_path, RAW + "asks('One?'); sends('/rewards', {'a': 1}); asks('Two?')")
    played = await caller.plays(lambda _: "yes", command=command, turns=1)
    assert (played.ending, dict(played.ended.rewards)) == ("max_turns", {"a": 1.0})


async def test_an_agent_that_takes_too_long_is_ended_with_all_that_it_started(
    caller: Any, tmp_path: Path
) -> None:
    code = f"""
asks('One?')
if os.fork() == 0:
    os.setsid()
open({str(tmp_path)!r} + f'/pid-{{os.getpid()}}', 'w').close()
time.sleep(3600)
"""
    played = await caller.plays(lambda _: "yes", command=agent(tmp_path, RAW + code), limit_s=3.0)
    pids = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]
    assert played.ending == "timeout" and len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


ONCE = """
said = asks('One?')
said = asks('One?', said, 'Two?')
file = os.path.join(os.getcwd(), 'was here')
if not os.path.exists(file):
    open(file, 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_an_agent_that_is_killed_goes_on_with_the_turns_that_there_are(
    caller: Any, tmp_path: Path
) -> None:
    command = agent(tmp_path, RAW + ONCE + "asks('One?', 'turn 1', 'Two?', said, 'Three?')")
    count = iter(range(1, 100))
    played = await caller.plays(lambda _: f"turn {next(count)}", command=command)
    assert played.ending == "completed" and played.said == [["One?"], ["Two?"], ["Three?"]]


async def test_an_agent_that_asks_for_something_else_after_its_death_is_begun_anew(
    caller: Any, tmp_path: Path
) -> None:
    command = agent(tmp_path, RAW + "asks(str(os.getpid()))" + ONCE)
    with pytest.raises(FailedPrecondition, match="did not ask for the same again"):
        await caller.plays(lambda _: "yes", command=command)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"command": "a", "function": "a.py:b"}, "a command or a function"),
        ({"command": "python 'agent.py"}, "No closing quotation"),
        ({"command": 1}, "is no text"),
        ({"function": "agent"}, "no path.py:name"),
        ({"function": "agent.py:play"}, "there is no file"),
        ({"command": "a", "folder": "/nowhere"}, "is no folder"),
        ({"command": "a", "processes": 1.5}, "is no whole number"),
        ({"processes": 2}, "no command or function"),
        ({"command": "a", "correct": "maybe"}, "none of none, last_number, contains"),
        ({"comand": "a"}, "no such parameter"),
        ({}, "no key to show"),
    ],
)
async def test_parameters_that_mean_nothing_are_refused_by_name(
    caller: Any, parameters: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidConfig, match=why):
        await caller.plays(lambda _: "yes", **parameters)
    if parameters:
        assert why in problem("agent", {"folder": str(caller.folder), **parameters}), "a plan says it, too"


async def test_a_plan_finds_nothing_wrong_with_an_agent_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    for parameters in ({"command": "a"}, {"function": "agent.py:play", "processes": 2.0}, {}):
        assert problem("agent", {"folder": str(tmp_path), **parameters}) == ""


async def test_episodes_beyond_the_sessions_of_a_replica_wait_and_that_is_no_time_of_their_own(
    few: Any, tmp_path: Path
) -> None:
    command = agent(tmp_path, RAW + "asks('One?')")
    played = await asyncio.gather(*(few.plays(lambda _: "yes", command=command) for _ in range(3)))
    assert [one.ending for one in played] == ["completed"] * 3
    assert len(few.stage.agents.gateway.sessions) == 0


POOLED = (
    RAW
    + """
def request(method, url, key, body=None):
    headers = {"authorization": "Bearer " + key}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as said:
        return json.loads(said.read() or b"{}")

while True:
    taken = request("GET", os.environ["FLOTILLA_TASKS_URL"], os.environ["FLOTILLA_RUN_KEY"])
    if taken:
        os.environ["FLOTILLA_SESSION_URL"], os.environ["FLOTILLA_SESSION_KEY"], _ = taken["session"].values()
        text = taken["task"]["messages"][0]["content"]
        asks(text)
        if text == "dies": os._exit(7)
        sends("/rewards", {"pid": os.getpid()})
        sends("/end", {})
"""
)


async def test_processes_of_a_run_take_one_task_after_the_other_and_a_dead_one_is_replaced(
    caller: Any, tmp_path: Path
) -> None:
    command = agent(tmp_path, POOLED)

    async def plays(prompt: str, run_id: str = "run") -> Any:
        return await caller.plays(lambda _: "yes", command=command, processes=2, prompt=prompt, run_id=run_id)

    played = await asyncio.gather(*(plays(f"{number}?") for number in range(6)))
    assert [one.ending for one in played] == ["completed"] * 6
    pids = {one.ended.rewards["pid"] for one in played}
    assert len(pids) <= 2
    (other,) = {(await plays("other", "another run")).ended.rewards["pid"]}
    assert other not in pids, "no process serves two runs"
    dead = await plays("dies")
    assert dead.ending == "error" and "exited with status 7" in dead.ended.failure.what
    assert (await plays("well?")).ending == "completed"


async def test_a_function_takes_many_tasks_in_one_process(caller: Any, tmp_path: Path) -> None:
    code = "def play(task):\n    assert asks('One?') != 'raise'\n    return {'pid': os.getpid()}"
    agent(tmp_path, RAW + code)
    options = {"function": "agent.py:play", "processes": 1}
    first = await caller.plays(lambda _: "yes", **options)
    assert (await caller.plays(lambda _: "raise", **options)).ending == "error"
    second = await caller.plays(lambda _: "yes", **options)
    assert first.ended.rewards["pid"] == second.ended.rewards["pid"]


async def test_processes_that_end_before_they_take_a_task_are_an_error_of_the_episodes_that_wait(
    caller: Any, tmp_path: Path
) -> None:
    for code, told in (("raise SystemExit(9)", "exited with status 9"), ("", "exited with status 1")):
        command = agent(tmp_path, code)
        played = await caller.plays(lambda _: "yes", command=command, processes=1, run_id=code)
        assert played.ending == "error" and told in played.ended.failure.what


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ZeroDivisionError("a defect")])
async def test_where_no_process_can_be_started_the_episodes_that_wait_are_told_and_the_next_one_is_played(
    caller: Any, tmp_path: Path, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    options: dict[str, Any] = {"command": agent(tmp_path, POOLED), "processes": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flotilla_environment.agents.process.socket.socketpair", fails)
        played = await caller.plays(lambda _: "yes", **options)
        assert played.ending == "error" and error.args[-1] in played.ended.failure.what
    assert (await caller.plays(lambda _: "yes", **options)).ending == "completed"


async def test_a_process_that_ends_before_its_task_takes_nothing_from_the_episodes_that_others_will_play(
    caller: Any, tmp_path: Path
) -> None:
    first = """
try:
    open("there is one", "x").close()
except FileExistsError:
    sys.exit(9)
"""
    command = agent(tmp_path, RAW + first + POOLED.removeprefix(RAW))
    played = await asyncio.gather(
        *(caller.plays(lambda _: "yes", command=command, processes=3, prompt=f"{at}?") for at in range(4))
    )
    assert [one.ending for one in played] == ["completed"] * 4


async def test_a_process_of_a_run_that_hangs_is_replaced(caller: Any, tmp_path: Path) -> None:
    code = POOLED.replace('if text == "dies": os._exit(7)', 'if text == "hangs": time.sleep(3600)')
    options: dict[str, Any] = {"command": agent(tmp_path, code), "processes": 1}
    hung = await caller.plays(lambda _: "yes", prompt="hangs", limit_s=2.0, **options)
    assert hung.ending == "timeout"
    assert (await caller.plays(lambda _: "yes", **options)).ending == "completed"


async def test_a_process_that_does_not_finish_its_task_after_the_end_of_its_episode_is_replaced(
    caller: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_environment.agents.episode.STOP_GRACE_S", 0.2)
    monkeypatch.setattr("flotilla_environment.agents.pool.COMES_S", 1.0)
    agent(
        tmp_path,
        RAW
        + """
def play(task):
    try:
        asks("One?")
    except Exception:
        time.sleep(3600)
    return {"pid": os.getpid()}
""",
    )
    options: dict[str, Any] = {"function": "agent.py:play", "processes": 1}
    first, over, after = [await caller.plays(lambda _: "yes", turns=turns, **options) for turns in (1, 0, 1)]
    assert [first.ending, over.ending, after.ending] == ["completed", "max_turns", "completed"]
    assert first.ended.rewards["pid"] != after.ended.rewards["pid"]


async def test_a_process_that_ends_after_each_task_is_replaced_and_nobody_fails(
    caller: Any, tmp_path: Path
) -> None:
    code = POOLED + "        sys.exit(0)\n"
    options: dict[str, Any] = {"command": agent(tmp_path, code), "processes": 1}
    played = await asyncio.gather(*(caller.plays(lambda _: "yes", **options) for _ in range(4)))
    assert [one.ending for one in played] == ["completed"] * 4
    assert len({one.ended.rewards["pid"] for one in played}) == 4


async def test_no_proxy_stands_between_a_trusted_agent_and_its_gateway(
    caller: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    played = await caller.plays(lambda _: "yes", command=agent(tmp_path, RAW + "asks('One?')"))
    assert played.ending == "completed", played.ended
