"""Servers of the public packages of OpenEnv and MCP are played unchanged, in rooms and at a url."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packages_of_others import python_of
from played_episodes import play_episode

from flotilla_environment.stage import Stage

pytestmark = pytest.mark.timeout(300)

TOOLS = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("shop")
        self.steps = 0

        @mcp.tool
        def price(item: str) -> str:
            "Say what an item costs."
            return {"tea": "3"}.get(item, "unknown")

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=8)
"""
HTTP = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b


server.run("streamable-http", port=int(sys.argv[1]))
"""


def uvicorn(python: Path, app: str, folder: Path) -> list[str]:
    return [str(python), "-m", "uvicorn", app, "--app-dir", str(folder), "--port", "{port}"]


async def test_the_environment_that_openenv_writes_is_played_as_it_is(stage: Stage, tmp_path: Path) -> None:
    python = python_of("openenv")
    made = [python.with_name("openenv"), "init", "echo", "--output-dir", tmp_path]
    subprocess.run(made, check=True, capture_output=True, env=os.environ | {"HOME": str(tmp_path)})
    (folder,) = (file.parent.parent for file in tmp_path.rglob("server/app.py"))
    parameters = {"command": uvicorn(python, "server.app:app", folder), "observation": "echoed_message"}
    said = await play_episode(
        stage, "openenv", parameters, ["hello", "you"], prompt="Talk.", call_limit_s=120.0
    )
    assert said.heard[1:] == [["hello"], ["you"]], said.ended
    assert said.ended.rewards["return"] == pytest.approx(0.5 + 0.3)
    # It takes one session at once, and the others wait for it.
    both = await asyncio.gather(
        *(play_episode(stage, "openenv", parameters, ["abc"], call_limit_s=120.0) for _ in range(3))
    )
    assert [one.ended.rewards["return"] for one in both] == [pytest.approx(0.3)] * 3


async def test_tools_of_an_openenv_server_are_called_by_eight_episodes_at_once(
    stage: Stage, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(TOOLS)
    parameters = {"command": uvicorn(python_of("openenv"), "shop:app", tmp_path)}
    calls = [{"price": {"item": "tea"}}, {"prize": {}}, "It costs 3."]
    together = await asyncio.gather(
        *(play_episode(stage, "openenv", parameters, calls, call_limit_s=120.0) for _ in range(8))
    )
    for said in together:
        assert [tool["name"] for tool in said.tools] == ["price"], said.ended
        assert said.heard[1] == ["3"] and said.heard[2][0].startswith("error: "), said.heard
        assert said.ended.metrics["tool_errors"] == 1.0
    assert len(stage.holders.pids) == 1


async def test_a_public_mcp_server_is_used_by_eight_episodes_at_once(stage: Stage) -> None:
    command = [str(python_of("mcp-server").with_name("mcp-server-time")), "--local-timezone", "UTC"]
    asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    answers = [{"convert_time": asked}, {"convert_time": asked | {"time": "noon"}}, "It is 21."]
    together = await asyncio.gather(
        *(
            play_episode(stage, "mcp", {"command": command}, answers, answer="21", call_limit_s=120.0)
            for _ in range(8)
        )
    )
    for said in together:
        assert "T21:00:00+09:00" in said.heard[1][0] and said.heard[2][0].startswith("error: "), said.ended
        assert said.ended.rewards == {"correct": 1.0}
    assert not stage.holders.pids


async def test_a_server_of_the_public_sdk_is_used_by_streamable_http(stage: Stage) -> None:
    with listening([str(python_of("mcp-server")), "-c", HTTP]) as url:
        answers = [{"add": {"a": 2, "b": 3}}, {"add": {"a": "x"}}, "It is 5."]
        together = await asyncio.gather(
            *(play_episode(stage, "mcp", {"url": f"{url}/mcp"}, answers, answer="5") for _ in range(8))
        )
    for said in together:
        assert said.heard[1] == ["5"] and said.heard[2][0].startswith("error: "), said.ended
        assert said.ended.rewards == {"correct": 1.0}


@contextmanager
def listening(command: list[str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen([*command, str(port)])
    try:
        until = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "the server does not listen"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
