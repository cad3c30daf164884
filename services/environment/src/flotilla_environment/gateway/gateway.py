"""The gateway of a replica: it listens where agents find it.

Invariants: it starts with the first agent. Beyond this host it is reached over TLS alone, and agents of this host reach
it on loopback without. Agents in a jail have no network: each connects to a socket of its own, which its jail listens
at and this process answers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack

from aiohttp import web

from flotilla_core.addresses import joined, loopback
from flotilla_core.config import GatewayConfig
from flotilla_core.errors import InvalidConfig, PortInUse
from flotilla_environment.gateway.connections import Bounded
from flotilla_environment.gateway.server import Application
from flotilla_environment.gateway.sessions import Sessions

KEEP_ALIVE_S = 600.0
"""Longer than clients keep an idle connection, so that none uses one that ends at that moment."""
MOST_CONNECTIONS = 4096
"""Connections at the same time, of all agents that share an address."""
MOST_OF_AN_AGENT = 128
"""Those of an agent in a jail, which has an address of its own."""
BACKLOG = 128
STOP_S = 1.0
"""The time that requests under way have when the service stops; no episode is played then."""


class Gateway:
    """The sessions of a replica, and the server that answers them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.sessions = Sessions()
        self._starting = asyncio.Lock()
        self._runner = web.AppRunner(
            Application(self.sessions).made(),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=STOP_S,
        )
        self._listening: list[asyncio.Server] = []
        self._url = ""

    async def start(self) -> str:
        """Listen, where it does not yet; return the URL that agents on this host have."""
        async with self._starting:
            if not self._url:
                self._url = await self._started()
        return self._url

    async def _started(self) -> str:
        config, tls = self._config, self._tls()
        async with AsyncExitStack() as where_it_fails:
            where_it_fails.push_async_callback(self.stop)
            await self._runner.setup()
            await self._listen(config.host, config.port, tls)
            if tls is not None:  # An agent of this host need not know the certificate.
                await self._listen(loopback(), 0)
            where_it_fails.pop_all()
        host, port = self._listening[-1].sockets[0].getsockname()[:2]
        return f"http://{joined(host, port)}"

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        serves = Bounded(self._serves, MOST_CONNECTIONS)
        try:
            made = await asyncio.get_running_loop().create_server(
                serves, host, port, ssl=tls, backlog=BACKLOG
            )
        except OSError as error:
            raise PortInUse(
                "the gateway of agents cannot listen",
                where=joined(host, port),
                why=str(error),
                next_step="Set environment.gateway of the stack.",
            ) from error
        self._listening.append(made)

    def _serves(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return self._runner.server()

    def _tls(self) -> ssl.SSLContext | None:
        config = self._config
        if config.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(config.certificate)
        except OSError as error:  # An error of TLS is one, too.
            raise InvalidConfig(
                "the certificate of the gateway cannot be used",
                where=f"environment.gateway.certificate: {config.certificate}",
                why=str(error),
            ) from error
        return context

    async def answer(self, listening: socket.socket) -> asyncio.Server:
        """Answer at the socket of one agent, until that is closed."""
        await self.start()
        serves = Bounded(self._serves, MOST_OF_AN_AGENT)
        return await asyncio.get_running_loop().create_server(serves, sock=listening, backlog=BACKLOG)

    async def stop(self) -> None:
        """Answer nothing any more."""
        for one in self._listening:
            one.close()
        self._listening.clear()
        await self._runner.cleanup()
