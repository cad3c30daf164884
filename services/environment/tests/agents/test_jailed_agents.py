"""Agents in a real jail: they reach the gateway and nothing else, and show their keys to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.errors import InvalidConfig
from flotilla_workers.jail.jail import find
from flotilla_workers.jail.level import Level

RAW = """
import json, os, socket, subprocess, sys, urllib.request

def sends(path, body):
    key = os.environ.get("FLOTILLA_SESSION_KEY") or os.environ["OPENAI_API_KEY"]
    headers = {"authorization": "Bearer " + key}
    url = os.environ["FLOTILLA_SESSION_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as said:
        return json.load(said)

def asks(text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    return sends("/v1/chat/completions", body)["choices"][0]["message"]["content"]

def fails(function, *given):
    try:
        function(*given)
    except OSError:
        return True
    return False

"""


@pytest.fixture
async def jailed(staged: Any, tmp_path: Path) -> AsyncIterator[Any]:
    found = await asyncio.to_thread(find, None, "environment")
    if found.level is not Level.NAMESPACES:
        pytest.skip("this host makes no namespaces")
    folder = tmp_path / "agents"
    folder.mkdir()
    async with staged(folder, {"isolation": {}}) as caller:
        yield caller


async def test_a_jailed_agent_reaches_its_gateway_and_no_other_network(jailed: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    url = await jailed.stage.agents.gateway.start()
    port = int(url.rpartition(":")[2])
    code = f"""
asks("One?")
assert fails(socket.create_connection, ("127.0.0.1", {port}), 1), "the port of the host"
assert fails(socket.create_connection, ("1.1.1.1", 80), 1), "the world"
assert fails(open, {str(tmp_path / "secret")!r}), "a file beside its folder"
assert fails(open, os.path.join(os.getcwd(), "new"), "w"), "its folder is read-only"
open("/tmp/new", "w").close()
shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
assert os.environ["OPENAI_API_KEY"] not in shown
sends("/rewards", {{"well": 1.0}})
"""
    (jailed.folder / "agent.py").write_text(RAW + code)
    played = await jailed.plays(lambda _: "yes", command="python agent.py", trusted=False)
    assert played.ending == "completed" and dict(played.ended.rewards) == {"well": 1.0}, played.ended


async def test_an_unchanged_agent_of_openai_plays_in_the_jail(jailed: Any) -> None:
    code = """
from openai import OpenAI

def play(task):
    said = OpenAI().chat.completions.create(model="any", messages=task["messages"])
    return {"length": len(said.choices[0].message.content)}
"""
    (jailed.folder / "agent.py").write_text(code)
    played = await jailed.plays(lambda _: "four", function="agent.py:play", trusted=False)
    assert dict(played.ended.rewards) == {"length": 4.0}, played.ended


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("socket.create_connection(('1.1.1.1', 80), 1)", "The jail has no network"),
        ("open('new', 'w')", "write to temporary folders alone"),
    ],
)
async def test_a_function_that_its_jail_stops_is_told_so(jailed: Any, does: str, says: str) -> None:
    (jailed.folder / "agent.py").write_text(f"import socket\n\ndef play(task):\n    {does}\n")
    played = await jailed.plays(lambda _: "yes", function="agent.py:play", trusted=False)
    assert says in played.ended.failure.what and "trusted: true" in played.ended.failure.what


async def test_what_an_agent_prints_is_in_the_log_of_its_service(
    jailed: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    (jailed.folder / "agent.py").write_text("def play(task):\n    print('a word')\n")
    await jailed.plays(lambda _: "yes", function="agent.py:play", trusted=False)
    assert "a word" in capfd.readouterr().err


async def test_jailed_agents_play_beside_each_other_and_in_processes_of_their_run(jailed: Any) -> None:
    (jailed.folder / "agent.py").write_text(RAW + "def play(task):\n    return {'pid': len(asks('One?'))}")
    options: dict[str, Any] = {"function": "agent.py:play", "trusted": False}
    for processes in (0, 2):
        played = await asyncio.gather(
            *(jailed.plays(lambda _: "yes", processes=processes, **options) for _ in range(4))
        )
        assert [one.ending for one in played] == ["completed"] * 4, played[0].ended


async def test_a_jailed_agent_that_dies_or_fails_says_so(jailed: Any) -> None:
    for code, told in (("os.kill(os.getpid(), 9)", "SIGKILL"), ("sys.exit(5)", "status 5")):
        (jailed.folder / "agent.py").write_text(RAW + code)
        played = await jailed.plays(lambda _: "yes", command="python agent.py", trusted=False)
        assert played.ending == "error" and told in played.ended.failure.what


async def test_where_no_jail_keeps_it_from_the_network_an_agent_runs_only_if_it_is_trusted(
    staged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_workers.jail.bubblewrap.executables", lambda: iter(()))
    (tmp_path / "agent.py").write_text(RAW + "asks('One?')")
    async with staged(tmp_path, {"isolation": {}}) as caller:
        with pytest.raises(InvalidConfig, match="cannot run here"):
            await caller.plays(lambda _: "yes", command="python agent.py", trusted=False)
        assert (await caller.plays(lambda _: "yes", command="python agent.py")).ending == "completed"


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_program_that_a_function_starts_finds_no_key_but_that_of_turns(
    jailed: Any, processes: int
) -> None:
    code = """
LOOKS = "cat /proc/self/environ /proc/[0-9]*/environ 2>/dev/null | tr '\\\\0' '\\\\n'"

def play(task):
    asks("One?")
    found = subprocess.run(["sh", "-c", LOOKS], capture_output=True, text=True).stdout.splitlines()
    keys = {one.partition("=")[0] for one in found if "_KEY=" in one}
    own = bool(keys & {"FLOTILLA_SESSION_KEY", "FLOTILLA_RUN_KEY"})
    return {"own": own + 0.0, "of turns": ("OPENAI_API_KEY" in keys) + 0.0}
"""
    (jailed.folder / "agent.py").write_text(RAW + code)
    options: dict[str, Any] = {"function": "agent.py:play", "processes": processes, "trusted": False}
    played = await jailed.plays(lambda _: "yes", **options)
    assert dict(played.ended.rewards) == {"own": 0.0, "of turns": 1.0}, played.ended


async def test_a_folder_of_the_host_is_shown_to_no_jailed_agent(jailed: Any) -> None:
    """Where a service is started in a container the folder of the command is often the root, with its processes."""
    (jailed.folder / "agent.py").write_text(RAW + "asks('One?')")
    (jailed.folder / "root").symlink_to("/")
    everybodys = jailed.folder / "shared"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    for folder in ("/", "/tmp", "/proc", "/proc/self/root", "/dev/shm", "/etc", "/usr", everybodys, "root"):
        with pytest.raises(InvalidConfig, match=r"environment\.parameters\.folder"):
            await jailed.plays(
                lambda _: "yes", command="true", folder=str(jailed.folder / folder), trusted=False
            )
    played = await jailed.plays(lambda _: "yes", command="true", folder="/", trusted=True)
    assert played.ending == "completed", "its owner vouches for it"
