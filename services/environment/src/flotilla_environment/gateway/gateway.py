"""The gateway of a replica: it listens where agents find it.

Invariants: it starts with the first agent. Beyond this host it is reached over TLS alone. Agents in a jail have no
network: each connects to a socket of its own, which its jail listens at and this process answers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from aiohttp import web

from flotilla_core.addresses import is_loopback, joined
from flotilla_core.config import GatewayConfig
from flotilla_core.errors import InvalidConfig, PortInUse
from flotilla_environment.gateway.server import Application
from flotilla_environment.gateway.sessions import Sessions

KEEP_ALIVE_S = 600.0
"""Longer than clients keep an idle connection, so that none uses one that ends at that moment."""
STOP_S = 1.0
"""The time that requests under way have when the service stops; no episode is played then."""


class Gateway:
    """The sessions of a replica, and the server that answers them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.sessions = Sessions()
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> str:
        """Listen, where it does not yet; return the URL that agents on this host have."""
        async with self._starting:
            if not self._url:
                self._url = await self._started()
        return self._url

    async def _started(self) -> str:
        config, tls = self._config, self._tls()
        self._runner = web.AppRunner(
            Application(self.sessions).made(),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=STOP_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            where = joined(config.host, config.port)
            raise PortInUse(
                "the gateway of agents cannot listen",
                where=where,
                why=str(error),
                next_step="Set environment.gateway of the stack.",
            ) from error
        port = self._runner.addresses[0][1]
        return f"{'https' if tls else 'http'}://{joined(config.host, port)}"

    def _tls(self) -> ssl.SSLContext | None:
        config = self._config
        if config.certificate is None:
            if is_loopback(config.host):
                return None
            raise InvalidConfig(
                "the gateway of agents is not reached from other hosts without TLS",
                where=f"environment.gateway.host: {config.host}",
                next_step="Set environment.gateway.certificate: a PEM file with certificate and private key.",
            )
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

    async def answer(self, listening: socket.socket) -> web.SockSite:
        """Answer at a socket, until the site is stopped."""
        await self.start()
        assert self._runner is not None
        site = web.SockSite(self._runner, listening)
        await site.start()
        return site

    async def stop(self) -> None:
        """Answer nothing any more."""
        if self._runner is not None:
            await self._runner.cleanup()
