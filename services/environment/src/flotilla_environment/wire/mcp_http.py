"""MCP by streamable HTTP: each message is a request, answered by JSON or by a stream of events.

Invariants: each request has a connection of its own. The session of a server lasts as long as the episode; one that the
server forgot is begun anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import aiohttp

from flotilla_environment.wire.http import MOST_BYTES, Address, Lost, body_of
from flotilla_environment.wire.mcp import Json, Take, parsed
from flotilla_workers.functions import Refusal

SESSION, VERSION = "Mcp-Session-Id", "MCP-Protocol-Version"
EVENTS = "text/event-stream"
ACCEPT = {"Accept": f"application/json, {EVENTS}", "Content-Type": "application/json"}
TELL_S = 10.0
LEAVE_S = 2.0


class StreamableHttp:
    """A server at a url."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._own: dict[str, str] = {}

    async def open(self) -> None:
        self._own = {}

    async def exchange(self, message: Json, take: Take, limit_s: float) -> None:
        async with asyncio.timeout(limit_s), self._posted(message) as response:
            if response.content_type == EVENTS:
                await _take_events(response, take)
                return
            for one in parsed((await body_of(response)).decode(errors="replace")):
                if await take(one):
                    return

    async def tell(self, message: Json) -> None:
        async with asyncio.timeout(TELL_S), self._posted(message):
            pass

    def agreed(self, version: str) -> None:
        self._own[VERSION] = version

    async def close(self) -> None:
        if SESSION in self._own:
            # Not every server ends sessions by itself, and none must keep us waiting.
            url = self._address.url
            with suppress(Lost, TimeoutError):
                async with (
                    asyncio.timeout(LEAVE_S),
                    self._address.session() as session,
                    session.delete(url, headers=self._own, allow_redirects=False),
                ):
                    pass

    @asynccontextmanager
    async def _posted(self, message: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the answer to a message; refuse what is none of MCP, and raise `Lost` where the session is over."""
        url, headers = self._address.url, ACCEPT | self._own
        async with (
            self._address.session() as session,
            session.post(url, data=json.dumps(message), headers=headers, allow_redirects=False) as response,
        ):
            if response.status == HTTPStatus.NOT_FOUND and SESSION in self._own:
                raise Lost(f"{url} has forgotten the session")
            if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                text = (await body_of(response))[:500].decode(errors="replace")
                if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise Lost(f"{url} answers with status {response.status}: {text}")
                raise Refusal(
                    f"{url} speaks no streamable HTTP of MCP to us: status {response.status}: {text}"
                )
            if (own := response.headers.get(SESSION)) is not None:
                self._own[SESSION] = own
            yield response


async def _take_events(response: aiohttp.ClientResponse, take: Take) -> None:
    """Read events until one is what is waited for."""
    heard, read_bytes = list[str](), 0
    rest = b""
    while part := await response.content.readany():
        read_bytes += len(part)
        if read_bytes > MOST_BYTES:
            raise Lost(f"{response.url} answers with more than {MOST_BYTES:,} bytes")
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                heard.append(line[5:].removeprefix(b" ").decode(errors="replace"))
            if line:
                continue
            for one in parsed("\n".join(heard)):
                if await take(one):
                    return
            heard = []
