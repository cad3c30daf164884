"""The Model Context Protocol, as a client of its tools: initialize, tools/list and tools/call.

Invariants: a server that went away is connected to again by the next request, which is sent once more, within the same
limit. What a server asks of a client is answered: a ping by nothing, and all else by the error that this client does
not do it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from flotilla_environment.wire.http import Lost
from flotilla_workers.functions import Refusal

NEWEST = "2025-06-18"
SPOKEN = ("2024-11-05", "2025-03-26", NEWEST)
"""The revisions that begin with `initialize`; in the next one a server may end a stream, which is to be resumed."""
METHOD_NOT_FOUND = -32601
MOST_TOOLS = 1_000
MOST_PAGES = 100
LONGEST_RESULT = 16_000
"""The most characters of a result that the policy reads."""

Json = dict[str, Any]
Take = Callable[[Json], Awaitable[bool]]
"""Takes what a server says, and returns whether it was what is waited for."""


class ServerError(Exception):
    """A server answered a request with an error."""


class Transport(Protocol):
    """A way to a server."""

    async def open(self) -> None:
        """Connect anew, and forget what there was."""

    async def exchange(self, message: Json, take: Take, limit_s: float) -> None:
        """Send a request, and give what the server says to `take` until that has its answer."""

    async def tell(self, message: Json) -> None:
        """Send what has no answer."""

    def agreed(self, version: str) -> None:
        """Take the revision that both sides speak."""

    async def close(self) -> None:
        """Leave the server."""


class McpServer:
    """A server, as one episode uses it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ids = itertools.count(1)
        self._connected = False

    async def tools(self, limit_s: float) -> list[Json]:
        """Return its tools, as chat templates know them."""
        found: list[Json] = []
        cursor: Json = {}
        until = time.monotonic() + limit_s
        for _ in range(MOST_PAGES):
            page = await self.ask("tools/list", cursor, until - time.monotonic())
            found += [described(tool) for tool in page.get("tools", ())]
            if not page.get("nextCursor") or len(found) > MOST_TOOLS:
                break
            cursor = {"cursor": page["nextCursor"]}
        if not 0 < len(found) <= MOST_TOOLS:
            raise Refusal(f"the server has {len(found)} tools, of 1 to {MOST_TOOLS:,}")
        return found

    async def call(self, name: str, arguments: Json, limit_s: float) -> tuple[str, bool]:
        """Return the text that a tool gave, and whether it succeeded."""
        try:
            result = await self.ask("tools/call", {"name": name, "arguments": arguments}, limit_s)
        except ServerError as error:
            return f"error: {error}", False
        except TimeoutError:
            return f"error: {name} took longer than {limit_s:.0f} s", False
        text = text_of(result)
        return (f"error: {text}", False) if result.get("isError") else (text, True)

    async def ask(self, method: str, params: Json, limit_s: float) -> Json:
        """Return the result of a request; once more where the server went away."""
        until = time.monotonic() + limit_s
        try:
            return await self._asked(method, params, until)
        except Lost:
            self._connected = False
            return await self._asked(method, params, until)

    async def close(self) -> None:
        await self._transport.close()

    async def _asked(self, method: str, params: Json, until: float) -> Json:
        if not self._connected:
            await self._transport.open()
            about = {
                "protocolVersion": NEWEST,
                "capabilities": {},
                "clientInfo": {"name": "flotilla", "version": "1"},
            }
            spoken = (await self._answer("initialize", about, until)).get("protocolVersion")
            if spoken not in SPOKEN:
                raise Refusal(
                    f"the server speaks revision {spoken!r} of MCP, and this client {', '.join(SPOKEN)}"
                )
            self._transport.agreed(spoken)
            await self._transport.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
            self._connected = True
        return await self._answer(method, params, until)

    async def _answer(self, method: str, params: Json, until: float) -> Json:
        number = next(self._ids)
        answers: list[Json] = []

        async def take(said: Json) -> bool:
            if "method" in said:
                if "id" in said:
                    await self._transport.tell(_answer_to(said))
            elif said.get("id") == number:
                answers.append(said)
            return bool(answers)

        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        await self._transport.exchange(request, take, until - time.monotonic())
        if not answers:
            raise Lost(f"the server ended its answer to {method} without a result")
        return _result_of(answers[0])


def parsed(text: str) -> list[Json]:
    """Return the messages in a text; none where it is no JSON, as what a server prints by mistake."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]


def _answer_to(asked: Json) -> Json:
    answer: Json = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "ping":
        return answer | {"result": {}}
    return answer | {"error": {"code": METHOD_NOT_FOUND, "message": "this client has tools alone"}}


def _result_of(said: Json) -> Json:
    if isinstance(error := said.get("error"), dict):
        raise ServerError(str(error.get("message", error)))
    result = said.get("result")
    if not isinstance(result, dict):
        raise Refusal(f"the server answered with {result!r:.200}, and a result is an object")
    return result


def described(tool: Any) -> Json:
    """Return a tool as chat templates know it."""
    match tool:
        case {"name": str(name), "inputSchema": dict(schema)}:
            return {"name": name, "description": str(tool.get("description") or ""), "parameters": schema}
    raise Refusal(f"the server has a tool without a name or a schema: {tool!r:.200}")


def text_of(result: Json) -> str:
    """Return what the policy reads of a result: its texts, or its structure where it has none."""
    parts = [_part(part) for part in result.get("content", ()) if isinstance(part, dict)]
    if not parts and "structuredContent" in result:
        parts = [json.dumps(result["structuredContent"])]
    return shortened("\n".join(parts))


def shortened(text: str) -> str:
    """Return a text, without its middle where it is too long for the policy."""
    left_out = len(text) - LONGEST_RESULT
    half = LONGEST_RESULT // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out:,} characters are left out]\n{text[-half:]}"


def _part(part: Json) -> str:
    resource = part.get("resource")
    if part.get("type") == "text":
        return str(part.get("text", ""))
    if isinstance(resource, dict) and "text" in resource:
        return str(resource["text"])
    if part.get("type") == "resource_link":
        return str(part.get("uri", ""))
    return f"[{part.get('type', 'something')} that cannot be shown as text]"
