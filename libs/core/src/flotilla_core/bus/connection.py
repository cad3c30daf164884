"""The connection of a process to NATS.

Invariants: after the first connect it reconnects for ever, and an outage costs one warning; nothing that is
built on it may end a service because NATS is away. `generation` grows with every reconnect: whoever holds a
subscription that lived in the server's memory sets it up again then.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError

from flotilla_core.bus.login import Login
from flotilla_core.errors import FailedPrecondition, InvalidConfig, Unauthenticated, Unavailable

REQUEST_TIMEOUT_S = 2.0
_RECONNECT_WAIT_S = 0.5
_PING_INTERVAL_S = 5

BUS_ERRORS = (TimeoutError, OSError, nats.errors.Error, APIError)
"""Whatever a call may raise because NATS is away, restarting or refusing."""

logger = logging.getLogger(__name__)


class Bus:
    """A connection that lasts as long as the process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._refusal = ""
        self.generation = 0
        self._client = Client()
        self._changed = asyncio.Event()

    @classmethod
    async def connect(cls, url: str, login: Login, *, name: str = "", timeout_s: float = 10.0) -> Bus:
        """Connect, trying for `timeout_s`; then stay connected until `close`."""
        if "@" in urlsplit(url).netloc:
            raise InvalidConfig(
                "the URL of a NATS server carries credentials",
                where=f"nats.url {url.partition('://')[0]}://...@{url.rpartition('@')[2]}",
                why="an address is shown on command lines and in logs",
                next_step="write user:password to a file of mode 0600, and name it in nats.credentials_file",
            )
        options = login.options()
        bus = cls(url)
        connecting = bus._client.connect(
            url,
            name=name or None,
            connect_timeout=2,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # it sleeps for it: fractions are fine
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=2,
            error_cb=bus._on_error,
            disconnected_cb=bus._on_disconnect,
            reconnected_cb=bus._on_reconnect,
            **options,
        )
        try:
            await asyncio.wait_for(connecting, timeout_s)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            if bus._refusal:
                raise Unauthenticated(
                    "NATS refuses this stack",
                    where=url,
                    why=bus._refusal,
                    next_step="set nats.credentials_file in stack.yaml to a file with user:password, or a token, of "
                    "that server",
                ) from None
            raise Unavailable(
                "NATS does not answer",
                where=url,
                why=str(error) or f"no connection within {timeout_s:g} s",
                next_step="start the stack (flotilla up), or set nats.url in stack.yaml",
            ) from None
        if not login.insecure and await _takes_anybody(url):
            await bus.close()
            raise FailedPrecondition(
                f"the NATS server at {url} takes anybody",
                where="nats.url",
                why="whoever reaches it could see and take away the registrations of this stack",
                next_step="give it users, and name the file with the credentials of this stack in "
                "nats.credentials_file; or, on a network that only this stack is in, set nats.insecure: true",
            )
        return bus

    @property
    def connected(self) -> bool:
        """Whether the connection stands now."""
        return self._client.is_connected

    @property
    def client(self) -> Client:
        """The connection itself, for core publish and subscribe."""
        return self._client

    def jetstream(self) -> JetStreamContext:
        """JetStream over this connection."""
        return self._client.jetstream(timeout=REQUEST_TIMEOUT_S)

    async def reconnected(self, generation: int) -> int:
        """Wait until the connection is newer than `generation`; the new one."""
        while self.generation <= generation:
            await self._changed.wait()
        return self.generation

    async def pause(self, generation: int, longest_s: float) -> None:
        """Wait before another try: until the connection is newer than `generation`, or `longest_s`."""
        try:
            async with asyncio.timeout(longest_s):
                await self.reconnected(generation)
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Send what is buffered and close."""
        if self._client.is_closed:
            return
        await self._client.close()

    async def _on_error(self, error: Exception) -> None:
        # Some tries of a login that is refused end in a reset connection instead: the last error may not say it.
        if "authorization" in str(error).lower():
            self._refusal = str(error)
        logger.debug("NATS: %r", error)

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed:
            logger.warning("the connection to NATS at %s is lost; trying again until it is back", self.url)

    async def _on_reconnect(self) -> None:
        logger.info("connected to NATS at %s again", self.url)
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()


async def _takes_anybody(url: str) -> bool:
    """Ask by connecting as nobody: what a server says of itself leaves out users that it takes without a password."""
    stranger = Client()
    try:
        await asyncio.wait_for(
            stranger.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=_ignore), 5.0
        )
    except (TimeoutError, OSError, nats.errors.Error):
        return False
    await stranger.close()
    return True


async def _ignore(_: Exception) -> None:
    """The refusal is the answer that was wanted."""
