"""HTTP to a server of others: one that a url names, or one in a room.

Invariants: each request has a connection of its own, so none waits in vain on one that died meanwhile. No redirect is
followed, and no more than a bounded answer is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp

from flotilla_environment.rooms import Room

MOST_BYTES = 4 << 20
CONNECT_S = 10.0


class Lost(Exception):
    """A server cannot be reached, ended, or went away while it answered."""


@dataclass(frozen=True)
class Address:
    """The place of a server."""

    url: str
    """The url that requests go to, without a slash at the end."""
    headers: Mapping[str, str] = field(default_factory=dict)
    room: Room | None = None
    """The room whose network it is in."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Give what makes one connection to it."""
        connector = aiohttp.TCPConnector(limit=1, force_close=True)
        if self.room is not None:
            inside = await self.room.new_socket()
            connector = aiohttp.TCPConnector(limit=1, force_close=True, socket_factory=lambda _: inside)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        traces = aiohttp.TraceConfig()
        traces.on_request_redirect.append(_refuse_redirect)
        try:
            async with aiohttp.ClientSession(
                connector=connector,
                headers=dict(self.headers),
                timeout=limits,
                read_bufsize=1 << 18,
                trace_configs=[traces],
            ) as session:
                yield session
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{self.url}: {type(error).__name__}: {error}") from error


async def _refuse_redirect(
    session: aiohttp.ClientSession, context: SimpleNamespace, asked: aiohttp.TraceRequestRedirectParams
) -> None:
    """Follow none: the headers of a request are meant for its server alone."""
    raise Lost(f"{asked.url} leads to another place, and a redirect is not followed")


async def body_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole of a bounded answer."""
    body = await response.content.read(MOST_BYTES + 1)
    while len(body) <= MOST_BYTES and (part := await response.content.read(MOST_BYTES + 1 - len(body))):
        body += part
    if len(body) > MOST_BYTES:
        raise Lost(f"{response.url} answers with more than {MOST_BYTES:,} bytes")
    return body
