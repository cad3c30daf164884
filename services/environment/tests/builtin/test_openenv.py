"""Environments of OpenEnv servers, at a url and in a room, are played by text, by fields and by tools."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import InvalidConfig
from flotilla_environment.holders import Holders
from flotilla_environment.wire import openenv
from flotilla_environment.wire.http import Address
from flotilla_workers.jail.jail import Jail

FILE = Path(__file__).parent.parent / "openenv_game.py"
COMMAND = [sys.executable, str(FILE), "{port}"]


@asynccontextmanager
async def serving(*arguments: Any) -> AsyncIterator[tuple[str, Any]]:
    spec = importlib.util.spec_from_file_location("openenv_game", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.Server(*arguments)
    async with _listening(server.app()) as url:
        yield url, server


@asynccontextmanager
async def _listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _app(*routes: web.RouteDef) -> web.Application:
    app = web.Application()
    app.add_routes(routes)
    return app


async def test_a_turn_fills_the_only_field_of_an_action_and_rewards_are_summed(played: Any) -> None:
    async with serving("text") as (url, server):
        parameters = {"url": f"{url}/", "reset": {"largest": 5}}
        said = await played(
            "openenv", parameters, ["1", "x", "2"], prompt="Find it.", info={"reset": {"a": 1}}
        )
        assert said.heard == [["Find it.\n\nGuess."], ["More."], ["error: Invalid message; guess: no number"]]
        assert said.tools == [] and said.ended.rewards == {"return": 0.75}
        assert said.ended.metrics == {"misses": 3.0, "steps": 2.0}
        assert server.resets == [{"seed": 7, "largest": 5.0, "a": 1.0}]
        stopped = await played("openenv", parameters, ["1"], info={"seed": 4})
        assert stopped.ended.ending == pb.ENDING_MAX_TURNS and stopped.ended.rewards == {"return": -0.25}
        assert not server.sessions


async def test_fields_of_an_action_are_a_function_and_an_observation_is_json(played: Any) -> None:
    async with serving("fields") as (url, _):
        said = await played(
            "openenv", {"url": url}, [{"act": {"at": 9}}, [{"act": {"at": 7}}, {"act": {"at": 7}}]]
        )
        (tool,) = said.tools
        assert (
            tool["name"] == "act" and tool["parameters"]["required"] == ["at"] and tool["description"] == "G."
        )
        assert said.heard[1] == ['{"hint": "Less.", "size": 5}']
        assert said.ended.rewards == {"return": 0.75}
        hints = await played("openenv", {"url": url, "observation": "hint", "action": "at"}, ["9", "7"])
        assert hints.heard[1] == ["Less."] and hints.ended.rewards == {"return": 0.75}
        wrong = await played("openenv", {"url": url, "action": "atx"})
        assert "actions have no field atx; they have at, sure" in wrong.ended.failure.what


async def test_tools_of_an_environment_are_called_as_steps(played: Any) -> None:
    async with serving("tools") as (url, _):
        said = await played("openenv", {"url": url}, [{"guess": {"guess": "9"}}, {"guess": {"guess": "7"}}])
        assert [tool["name"] for tool in said.tools] == ["guess"] and said.heard[1] == ["Less."]
        assert said.ended.rewards == {"return": 0.75} and said.ended.metrics["tool_calls"] == 2.0
        ended = await played("openenv", {"url": url}, [{"guess": {"guess": "9"}}, "I give up."])
        assert ended.ended.ending == pb.ENDING_COMPLETED and ended.ended.rewards == {"return": -0.25}


async def test_a_server_that_breaks_or_leaves_is_an_error_and_no_reward(played: Any) -> None:
    async with serving("text") as (url, _):
        broke, left = [await played("openenv", {"url": url}, ["1", word]) for word in ("break", "leave")]
        assert "the OpenEnv server failed in step: it broke" in broke.ended.failure.what
        assert "lost in a step: the OpenEnv server has ended the session" in left.ended.failure.what
        assert not broke.ended.rewards and not left.ended.rewards
    gone = await played("openenv", {"url": url})
    assert "the OpenEnv server is not there: http" in gone.ended.failure.what


async def test_what_nobody_asked_for_is_no_answer_to_the_next_question(played: Any) -> None:
    async with serving("text") as (url, _):
        said = await played("openenv", {"url": url}, ["say 2", "7"])
        assert said.heard[1:] == [["Said."]] and not said.ended.rewards
        assert "the OpenEnv server says more than it was asked" in said.ended.failure.what


async def test_what_nobody_asked_for_is_not_kept(played: Any) -> None:
    async with serving("text") as (url, _):
        session = openenv.OpenEnvSession(Address(url))
        await session.reset({"seed": 7})
        await session.step({"guess": "say 1000"})
        assert session._reading is not None
        async with asyncio.timeout(10):
            await session._reading
        assert session._heard.qsize() <= 2
        await session.close()


async def test_a_redirect_takes_no_header_to_another_host(played: Any) -> None:
    heard: list[str | None] = []

    async def of_another(request: web.Request) -> web.Response:
        heard.append(request.headers.get("X-Api-Key"))
        return web.Response()

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"{another}/ws")

    async with (
        _listening(_app(web.get("/ws", of_another))) as another,
        serving("text") as (_, server),
        _listening(_app(web.get("/schema", server.schema), web.get("/ws", redirect))) as url,
    ):
        said = await played("openenv", {"url": url, "headers": {"X-Api-Key": "secret"}})
    assert f"{url}/ws leads to another place" in said.ended.failure.what and not heard


async def test_a_server_without_a_state_gives_its_rewards(played: Any) -> None:
    async with serving("stateless") as (url, _):
        said = await played("openenv", {"url": url}, ["1", "7"])
    assert said.ended.rewards == {"return": 0.75}, said.ended
    assert said.ended.metrics == {"steps": 2.0}


async def test_an_episode_waits_for_a_free_session_and_is_refused_by_name_where_none_comes(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving("text", 1) as (url, server):
        both = await asyncio.gather(*(played("openenv", {"url": url}, ["7"]) for _ in range(3)))
        assert all(one.ended.rewards == {"return": 1.0} for one in both)
        monkeypatch.setattr(openenv, "CAPACITY_S", 0.1)
        server.sessions = 1
        said = await played("openenv", {"url": url})
        assert "takes 1 sessions at once" in said.ended.failure.what
        assert "raise max_concurrent_envs of the server" in said.ended.failure.what


async def test_eight_episodes_share_the_server_of_their_run_in_its_room(
    played: Any, namespaces: Jail, holders: Holders
) -> None:
    guesses = ["1", "7"]
    said = await asyncio.gather(*(played("openenv", {"command": COMMAND}, guesses) for _ in range(8)))
    assert [one.ended.rewards for one in said] == [{"return": 0.75}] * 8, said[0].ended
    assert len(holders.pids) == 1
    await holders.stop()
    assert not holders.pids


async def test_a_server_that_died_is_started_anew_for_the_next_episode(
    played: Any, namespaces: Jail, holders: Holders
) -> None:
    script = (
        f"exec(open({str(FILE)!r}).read().replace('await socket.close()', '__import__(\"os\")._exit(1)', 9))"
    )
    parameters = {"command": [sys.executable, "-c", script, "{port}"]}
    died = await played("openenv", parameters, ["leave"])
    assert "was lost in a step" in died.ended.failure.what
    again = await played("openenv", parameters, ["7"])
    assert again.ended.rewards == {"return": 1.0}, again.ended


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nowhere/server"], "/nowhere/server does not start"),
        ([sys.executable, "-c", "raise SystemExit('no port')"], "exited with status 1\nno port"),
        ([sys.executable, "-c", "print('printed')"], "exited with status 0\nprinted"),
    ],
)
async def test_a_server_that_does_not_start_is_told_with_its_last_words(
    played: Any, namespaces: Jail, command: list[str], why: str
) -> None:
    said = await played("openenv", {"command": command})
    assert why in said.ended.failure.what


@pytest.mark.parametrize(
    "parameters", [{}, {"url": "a"}, {"command": "a b"}, {"url": "http://a", "command": ["a"]}]
)
async def test_parameters_that_name_no_server_fail_the_call(played: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="the environment cannot be loaded"):
        await played("openenv", parameters)
