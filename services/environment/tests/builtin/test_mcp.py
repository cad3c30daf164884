"""The tools of real MCP servers, by processes in rooms and by HTTP, are functions of the policy."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import InvalidConfig
from flotilla_environment.holders import Holders
from flotilla_workers.pool import FairShare

SERVER = Path(__file__).parent.parent / "mcp_tools.py"
COMMAND = [sys.executable, str(SERVER)]


def answered(asked: dict[str, Any], version: str = "") -> Any:
    spec = importlib.util.spec_from_file_location("mcp_tools", SERVER)
    assert spec is not None and spec.loader is not None
    if "mcp_tools" not in sys.modules:
        sys.modules["mcp_tools"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["mcp_tools"])
    return sys.modules["mcp_tools"].answered(asked, version)


async def test_the_tools_of_a_process_are_called_and_the_answer_is_scored(
    played: Any, holders: Holders
) -> None:
    said = await played(
        "mcp", {"command": COMMAND}, [{"add": {"a": 2}}, {"add": {"a": 3}}, "It is 5."], answer="5"
    )
    assert [tool["name"] for tool in said.tools][:2] == ["add", "fail"] and len(said.tools) == 9
    assert said.tools[0]["parameters"]["required"] == ["a"]
    assert said.heard == [["prompt"], ["2"], ["5"]]
    assert said.ended.rewards == {"correct": 1.0}
    assert said.ended.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    assert not holders.pids


async def test_what_the_policy_calls_wrong_is_told_to_it(played: Any) -> None:
    calls = [{"fail": {}}, {"refuse": {"a": 1}}, {"nothing": {}}, {"picture": {}}]
    said = await played(
        "mcp", {"command": COMMAND, "tools": ["fail", "refuse", "picture"]}, [calls, "?"], answer="5"
    )
    assert said.heard[1] == [
        "error: no",
        "error: a is wrong",
        "error: there is no tool 'nothing'; there is fail, refuse, picture",
        "[image that cannot be shown as text]",
    ]
    assert said.ended.rewards == {"correct": 0.0} and said.ended.metrics["tool_errors"] == 3.0


async def test_a_server_that_asks_and_one_that_is_slow_keep_nobody(played: Any) -> None:
    parameters = {"command": COMMAND, "limit_s": 1.0}
    said = await played("mcp", parameters, [{"pinged": {}}, {"slow": {}}, "5"], answer="5")
    assert said.heard[1] == ["no"] and said.heard[2] == ["error: slow took longer than 1 s"]
    assert said.ended.rewards == {"correct": 1.0}


async def test_a_server_that_ended_between_two_calls_is_started_again(played: Any) -> None:
    answers = [{"add": {"a": 2}}, {"leave": {}}, {"add": {"a": 3}}, "3"]
    said = await played("mcp", {"command": COMMAND}, answers, answer="3")
    assert said.heard == [["prompt"], ["2"], ["no"], ["3"]] and said.ended.rewards == {"correct": 1.0}


async def test_a_server_that_dies_in_a_call_twice_is_an_error_and_no_reward(played: Any) -> None:
    said = await played("mcp", {"command": COMMAND}, [{"die": {}}, "5"])
    assert said.ended.ending == pb.ENDING_ERROR and not said.ended.rewards
    assert "was lost twice in a call of die: the server" in said.ended.failure.what
    assert "exited with status 3" in said.ended.failure.what


async def test_eight_episodes_have_a_process_each(played: Any, holders: Holders) -> None:
    add = [{"add": {"a": 2}}]
    together = await asyncio.gather(
        *(played("mcp", {"command": COMMAND}, [*add * 2, "4"], answer="4") for _ in range(8))
    )
    assert all(said.heard == [["prompt"], ["2"], ["4"]] for said in together)
    assert not holders.pids


async def test_episodes_that_begin_take_turns_and_their_wait_is_no_time_of_theirs(
    played: Any, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = holders.place("run", trusted=False).rooms
    monkeypatch.setattr(rooms, "beginnings", FairShare())
    waits = [
        asyncio.ensure_future(played("mcp", {"command": COMMAND}, ["5"], answer="5", call_limit_s=20.0))
        for _ in range(3)
    ]
    async with asyncio.timeout(10):
        while sum(map(len, rooms.beginnings._waiting.values())) < len(waits):
            await asyncio.sleep(0)
    await asyncio.sleep(0.1)  # The wait that is told.
    assert not holders.pids
    rooms.beginnings.add(0)
    said = await asyncio.gather(*waits)
    assert all(one.ended.rewards == {"correct": 1.0} and one.waited_s > 0.0 for one in said)
    assert max(one.waited_s for one in said) < 20.0


async def test_a_command_sees_the_variables_of_the_run_and_none_of_the_service(
    played: Any, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "of the service")
    said = await played("mcp", {"command": COMMAND}, [{"variable": {}}])
    given = await played("mcp", {"command": COMMAND, "environment": {"GIVEN": "x"}}, [{"variable": {}}])
    assert (said.heard[1], given.heard[1]) == (["none"], ["x"])
    named = {"command": COMMAND, "environment": {"GIVEN": "${GIVEN}"}}
    refused = await played("mcp", named)
    assert (
        "${GIVEN} is none of the variables that environment.isolation.environment"
        in refused.ended.failure.what
    )
    holders.jail = replace(holders.jail, environment=("GIVEN",))
    hidden = await played("mcp", {"command": COMMAND}, [{"variable": {}}])
    shown = await played("mcp", named, [{"variable": {}}])
    assert (hidden.heard[1], shown.heard[1]) == (["none"], ["of the service"])


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"command": ["/nowhere/server"]}, "/nowhere/server does not start: No such file or directory"),
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('no room')"]},
            "exited with status 1\nno room",
        ),
        ({"command": [*COMMAND, "2026-07-28"]}, "speaks revision '2026-07-28' of MCP"),
        ({"command": COMMAND, "tools": ["ad"]}, "has no tool ad; it has add, fail,"),
        ({"url": "http://127.0.0.1:9/mcp"}, "gives no tools: http://127.0.0.1:9/mcp: ClientConnectorError"),
    ],
)
async def test_a_server_that_cannot_be_used_is_an_error_with_its_reason(
    played: Any, parameters: dict[str, Any], why: str
) -> None:
    said = await played("mcp", parameters)
    assert said.ended.ending == pb.ENDING_ERROR and why in said.ended.failure.what


@pytest.mark.parametrize(
    "parameters", [{}, {"command": ["a"], "url": "http://a"}, {"command": "a b"}, {"url": "a"}]
)
async def test_parameters_that_name_no_server_fail_the_call(played: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="the environment cannot be loaded"):
        await played("mcp", parameters)


@dataclass
class HttpServer:
    """An MCP server by streamable HTTP, in this process."""

    streams: bool = False
    takes_s: float = 0.0
    """Time for all after the first session."""
    url: str = ""
    sessions: set[str] = field(default_factory=set)
    begun: int = 0
    forgets: bool = False
    """True where the next call finds its session forgotten."""
    versions: set[str | None] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)

    async def post(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.text())
        session = request.headers.get("Mcp-Session-Id", "")
        if asked.get("method") == "initialize":
            self.begun += 1
            self.offered.add(asked["params"]["protocolVersion"])
            session = f"s{self.begun}"
            self.sessions.add(session)
        elif session not in self.sessions or (self.forgets and asked.get("method") == "tools/call"):
            self.forgets = False
            return web.Response(status=404)
        elif "method" in asked:
            self.versions.add(request.headers.get("MCP-Protocol-Version"))
        if self.begun > 1:
            await asyncio.sleep(self.takes_s)
        answer = answered(asked, "2025-06-18")
        if answer is None:
            return web.Response(status=202)
        if not self.streams:
            return web.json_response(answer, headers={"Mcp-Session-Id": session})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Mcp-Session-Id": session})
        await stream.prepare(request)
        ping = json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"})
        first, rest = (text := json.dumps(answer, indent=1)).split("\n", 1)[0], text.split("\n", 1)[1]
        data = "\r\n".join(f"data: {line}" for line in (first, *rest.split("\n")))
        await stream.write(f": alive\r\n\r\ndata: {ping}\r\n\r\nid: 1\r\n{data}\r\n\r\n".encode())
        return stream

    async def delete(self, request: web.Request) -> web.Response:
        self.sessions.discard(request.headers["Mcp-Session-Id"])
        return web.Response()


async def _moved(_: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": "/mcp"})


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[HttpServer]:
    app = web.Application()
    app.router.add_post("/mcp", server.post)
    app.router.add_delete("/mcp", server.delete)
    app.router.add_post("/moved", _moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("streams", [False, True], ids=["json", "events"])
async def test_a_server_by_http_is_left_with_its_session_and_begun_anew_where_it_forgot(
    played: Any, streams: bool
) -> None:
    async with serving(HttpServer(streams)) as server:
        said = await played("mcp", {"url": server.url}, [{"picture": {}}, "5"], answer="5")
        assert said.ended.rewards == {"correct": 1.0}, said.ended
        assert (server.begun, server.sessions, server.versions) == (1, set(), {"2025-06-18"})
        assert server.offered == {"2025-06-18"}
        again = await asyncio.gather(
            *(played("mcp", {"url": server.url}, [{"picture": {}}, "5"], answer="5") for _ in range(8))
        )
        assert all(one.ended.rewards == {"correct": 1.0} for one in again) and server.begun == 9

        server.forgets = True
        forgot = await played("mcp", {"url": server.url}, [{"fail": {}}, "5"], answer="5")
        assert forgot.heard[1] == ["error: no"] and forgot.ended.rewards == {"correct": 1.0}
        assert server.begun == 11 and not server.forgets
        moved = await played("mcp", {"url": server.url.replace("/mcp", "/moved")})
        assert "speaks no streamable HTTP of MCP to us: status 307" in moved.ended.failure.what


async def test_a_call_that_is_sent_again_has_what_is_left_of_its_limit(played: Any) -> None:
    async with serving(HttpServer(takes_s=0.6, forgets=True)) as server:
        parameters = {"url": server.url, "limit_s": 1.0}
        said = await played("mcp", parameters, [{"fail": {}}, "5"], answer="5")
        assert said.heard[1] == ["error: fail took longer than 1 s"] and server.begun == 2


def test_no_process_of_a_test_is_left() -> None:
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs_server(pid)]
    assert not left


def _runs_server(pid: str) -> bool:
    try:
        return str(SERVER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
