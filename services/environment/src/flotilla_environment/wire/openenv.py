"""The protocol of OpenEnv, as a client: one WebSocket is one session of an environment.

Invariants: what comes is read all the time, so a server's signs of life are answered while the policy writes. Each
answer is that of the last question: a server that says more than it was asked ends the session. A session that is lost
is never taken up again: its world is gone.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp

from flotilla_environment.wire.http import MOST_BYTES, Address, Lost, body_of
from flotilla_environment.wire.mcp import described
from flotilla_workers.functions import Refusal

Json = dict[str, Any]
CAPACITY, WRONG_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
CAPACITY_S = 15.0
AGAIN_S = 0.25
LEAVE_S = 2.0
SIGN_OF_LIFE_S = 20.0
MORE = "the OpenEnv server says more than it was asked"


class ActionRefused(Exception):
    """The server says that an action is none of its environment."""


class OpenEnvSession:
    """A session of an environment at a server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._held = AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._heard: asyncio.Queue[str | Lost] = asyncio.Queue()
        """An answer, and why nothing more comes."""
        self._reading: asyncio.Task[None] | None = None

    async def action(self) -> Json:
        """Return the schema of its actions."""
        url = f"{self._address.url}/schema"
        async with self._address.session() as session, session.get(url, allow_redirects=False) as response:
            text = (await body_of(response)).decode(errors="replace")
            if response.status != 200:
                raise Refusal(
                    f"{url} answers with status {response.status}, and an OpenEnv server with its schemas"
                )
        match _object(text):
            case {"action": dict(action)}:
                return action
        raise Refusal(f"{url} says no schema of actions: {text[:200]}")

    async def reset(self, data: Json) -> Json:
        """Begin an episode; wait for a while where the server has as many sessions as it takes."""
        until = asyncio.get_running_loop().time() + CAPACITY_S
        while True:
            await self._connect()
            said = await self._ask({"type": "reset", "data": data}, "observation", raises=False)
            if said.get("code") != CAPACITY:
                break
            await self.close()
            if asyncio.get_running_loop().time() > until:
                raise Refusal(
                    f"the OpenEnv server takes {said.get('max_sessions', 'no more')} sessions at once, and had no free "
                    f"one for {CAPACITY_S:g} s: raise max_concurrent_envs of the server"
                )
            await asyncio.sleep(AGAIN_S)
        if "observation" not in said:
            raise Refusal(f"the OpenEnv server does not begin: {_reason(said)}")
        return said

    async def step(self, action: Json) -> Json:
        """Take an action; return the observation, with its reward and whether the episode has ended."""
        return await self._ask({"type": "step", "data": action}, "observation")

    async def state(self) -> Json:
        """Return what the environment says of its state."""
        return await self._ask({"type": "state"}, "state")

    async def tools(self) -> list[Json]:
        """Return the tools of the environment, as chat templates know them."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        said = await self._ask({"type": "mcp", "data": request}, "mcp")
        match said:
            case {"result": {"tools": list(tools)}}:
                return [described(_named(tool)) for tool in tools]
        raise Refusal(f"the OpenEnv server lists no tools: {_reason(said.get('error') or said)}")

    async def close(self) -> None:
        """Leave the session, which frees it at the server."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError, Lost):
                await self._reading
            self._reading = None
        if self._socket is not None:
            with suppress(Lost, TimeoutError, OSError, aiohttp.ClientError):
                async with asyncio.timeout(LEAVE_S):
                    await self._socket.send_str(json.dumps({"type": "close"}))
                    await self._socket.close()
            self._socket = None
        with suppress(Lost):
            await self._held.aclose()

    async def _connect(self) -> None:
        self._held, self._heard = AsyncExitStack(), asyncio.Queue()
        session = await self._held.enter_async_context(self._address.session())
        url = f"{self._address.url}/ws"
        try:
            self._socket = await self._held.enter_async_context(
                session.ws_connect(url, max_msg_size=MOST_BYTES, heartbeat=SIGN_OF_LIFE_S)
            )
        except aiohttp.WSServerHandshakeError as error:
            raise Refusal(f"{url} is no session of OpenEnv: status {error.status}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{url}: {type(error).__name__}: {error}") from None
        self._reading = asyncio.ensure_future(self._read(self._socket, self._heard))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, heard: asyncio.Queue[str | Lost]) -> None:
        """Read until the session ends, or somebody has to take what came first."""
        why = "the OpenEnv server has ended the session"
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    if not heard.empty():
                        why = MORE
                        return
                    heard.put_nowait(message.data)
        finally:
            heard.put_nowait(Lost(why))

    async def _ask(self, message: Json, kind: str, *, raises: bool = True) -> Json:
        assert self._socket is not None
        early = not self._heard.empty()
        try:
            await self._socket.send_str(json.dumps(message))
        except (aiohttp.ClientError, OSError):
            pass  # Why it ended may have been said before.
        text = await self._heard.get()
        if isinstance(text, Lost):
            raise text
        said = _object(text)
        if early and (raises or said.get("type") != "error"):
            raise Refusal(f"{MORE}: {text[:200]!r}")
        data = said.get("data")
        if not isinstance(data, dict):
            raise Refusal(f"the OpenEnv server says {text[:200]!r}")
        if said.get("type") == "error":
            if raises and data.get("code") == WRONG_ACTION:
                raise ActionRefused(_reason(data))
            if raises:
                raise Refusal(f"the OpenEnv server failed in {message['type']}: {_reason(data)}")
        elif said.get("type") != kind:
            raise Refusal(f"the OpenEnv server answers {message['type']} with {said.get('type')!r}")
        return data


def _object(text: str) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _reason(data: Json) -> str:
    """Return an error of the server in words, with the places that it names in an action."""
    text = str(data.get("message", data))
    errors = [one for one in data.get("errors") or () if isinstance(one, dict)]
    places = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors]
    return "; ".join([text, *places])[:2_000]


def _named(tool: Any) -> Any:
    """Return a tool with its schema under the name that MCP has for it."""
    if isinstance(tool, dict) and "input_schema" in tool:
        return tool | {"inputSchema": tool["input_schema"]}
    return tool
