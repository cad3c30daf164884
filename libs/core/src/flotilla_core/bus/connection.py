"""The connection of a process to NATS, and what the process shows to the server.

Invariants: after the first connect it reconnects without limit, and an outage costs one warning; nothing that is built
on it may end a service because NATS is away. `generation` grows with every reconnect: a holder of a subscription that
lived in the server's memory sets it up again then. A password or token is read from its file at each connection, for
the stack's own server has a new one at each of its starts; it is on no command line and in no environment variable.
The stack's own server shows a certificate of the stack, whatever its address is, and is shown ours.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError

from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    Unauthenticated,
    Unavailable,
)
from flotilla_core.rpc.tls import broken_by
from flotilla_core.trust import Credential, read_secret
from flotilla_core.trust.roles import SERVER_NAME

if TYPE_CHECKING:
    from flotilla_core.config.stack import NatsConfig

REQUEST_TIMEOUT_S = 2.0
_RECONNECT_WAIT_S = 0.5
_PING_INTERVAL_S = 5

BUS_ERRORS = (TimeoutError, OSError, nats.errors.Error, APIError)
"""The errors that a call may raise because NATS is away, restarting or refusing."""

logger = logging.getLogger(__name__)

SERVICE, COORDINATOR = "service", "coordinator"
OWN_FILES = {SERVICE: Path("nats") / "credentials", COORDINATOR: Path("nats") / "coordinator-credentials"}
"""The file of each user of the stack's own server, in the stack's directory."""
_KEY = "nats.credentials_file"


class Login:
    """The credentials that a process presents to a NATS server.

    Tells how to connect to one server.
    """

    def __init__(
        self,
        file: Path | None,
        credential: Credential | None = None,
        key: str = _KEY,
        *,
        ca_file: Path | None = None,
        insecure: bool = False,
    ) -> None:
        """`credential` encrypts the connection: the server shows a certificate of the stack, and is shown ours.

        With a `ca_file` it is a server of others, which shows one of these authorities for the host of its URL.
        `insecure` says that a server without authentication is accepted.
        """
        self.insecure = insecure
        self._credential = credential
        self._ca_file = ca_file
        self._file = file
        self._key = key

    @classmethod
    def of_stack(
        cls, nats: NatsConfig, directory: Path, credential: Credential, user: str = SERVICE
    ) -> Login:
        """Return the login of a process of the stack whose files are in `directory`.

        The stack's own server knows it as `user`.
        """
        if nats.url is None:
            return cls(directory / OWN_FILES[user], credential, "the credentials of the stack's NATS server")
        return cls(
            nats.credentials_file,
            credential if nats.url.startswith("tls://") else None,
            ca_file=nats.ca_file,
            insecure=nats.insecure,
        )

    def options(self) -> dict[str, Any]:
        """Return what the NATS client takes; raise InvalidConfig where the file does not hold it."""
        options = self.encryption(with_certificate=True)
        if self._file is None:
            return options
        if self._read()[0]:
            return options | {"user": self._later(0), "password": self._later(1)}
        return options | {"token": self._later(1)}

    def encryption(self, *, with_certificate: bool) -> dict[str, Any]:
        """Return how the NATS client encrypts, with or without showing who it is."""
        if self._credential is None:
            return {}
        ours = None if self._ca_file else self._credential.current().authorities.decode()
        context = ssl.create_default_context(cafile=self._ca_file, cadata=ours)
        if with_certificate:
            context.load_cert_chain(*self._credential.files[:2])
        if self._ca_file is not None:
            return {"tls": context}
        # No password is sent to what has not shown its certificate.
        return {"tls": context, "tls_hostname": SERVER_NAME, "tls_handshake_first": True}

    async def explained(self, url: str, error: FlotillaError) -> FlotillaError:
        """Return what a certificate has to do with a failed connection; the error itself where nothing."""
        if self._credential is None or self._ca_file is not None:
            return error
        return await asyncio.to_thread(broken_by, urlsplit(url).netloc, self._credential) or error

    def _read(self) -> tuple[str, str]:
        assert self._file is not None
        text = read_secret(self._file, self._key).strip()
        where = f"{self._key} {self._file}"
        if text.startswith("-----BEGIN NATS") or len(text.splitlines()) > 1:
            raise InvalidConfig(
                "the file of NATS credentials is not one line",
                where=where,
                why="credentials by JWT and NKEY (.creds) are not supported",
                next_step="write one line: user:password, or a token",
            )
        user, colon, password = text.partition(":")
        return (user, password) if colon else ("", text)

    def _later(self, part: int) -> Callable[[], str]:
        def read() -> str:
            try:
                return self._read()[part]
            except FlotillaError as error:
                # As the client of NATS knows it: it tries again until the file is as it should be.
                raise ConnectionError(str(error)) from error

        return read


class Bus:
    """A connection that lasts as long as the process."""

    def __init__(self, url: str, login: Login, replicas: int = 1) -> None:
        self.url = url
        self._login = login
        self.replicas = replicas
        """The number of servers of a cluster that keep what is created over this connection."""
        self._refusal = ""
        self.generation = 0
        self._client = Client()
        self._changed = asyncio.Event()

    @classmethod
    async def connect(
        cls, url: str, login: Login, *, name: str = "", timeout_s: float = 10.0, replicas: int = 1
    ) -> Bus:
        """Connect, trying for `timeout_s`; then stay connected until `close`."""
        if "@" in urlsplit(url).netloc:
            raise InvalidConfig(
                "the URL of a NATS server carries credentials",
                where=f"nats.url {url.partition('://')[0]}://...@{url.rpartition('@')[2]}",
                why="an address is shown on command lines and in logs",
                next_step="write user:password to a file of mode 0600, and name it in nats.credentials_file",
            )
        options = login.options()
        bus = cls(url, login, replicas)
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
            silent = Unavailable(
                "NATS does not answer",
                where=url,
                why=str(error) or f"no connection within {timeout_s:g} s",
                next_step="start the stack (flotilla up), or set nats.url in stack.yaml",
            )
            refused = Unauthenticated(
                "NATS refuses this stack",
                where=url,
                why=bus._refusal,
                next_step="set nats.credentials_file in stack.yaml to a file with user:password, or a token, of "
                "that server",
            )
            # A server that reads its files again refuses whoever is connecting then, so certificates are asked first.
            raise await login.explained(url, refused if bus._refusal else silent) from None
        if not login.insecure and await _takes_anybody(url, login):
            await bus.close()
            raise FailedPrecondition(
                f"the NATS server at {url} takes anybody",
                where="nats.url",
                why="any client that reaches it could read and delete the registrations of this stack",
                next_step="give it users, and name the file with the credentials of this stack in "
                "nats.credentials_file; or, on a network that only this stack is in, set nats.insecure: true",
            )
        return bus

    @property
    def connected(self) -> bool:
        """Return whether the connection stands now."""
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

    def _renew(self) -> None:
        """Show the certificate that is in our files now, at the next connection."""
        try:
            self._client.options |= self._login.encryption(with_certificate=True)
        except OSError as error:
            logger.debug("the certificate stays, for its files cannot be used: %r", error)

    async def _on_error(self, error: Exception) -> None:
        # Some tries of a login that is refused end in a reset connection instead: the last error may not say it.
        if "authorization" in str(error).lower():
            self._refusal = str(error)
        self._renew()
        logger.debug("NATS: %r", error)

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed:
            self._renew()
            logger.warning("the connection to NATS at %s is lost; trying again until it is back", self.url)

    async def _on_reconnect(self) -> None:
        logger.info("connected to NATS at %s again", self.url)
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()


async def _takes_anybody(url: str, login: Login) -> bool:
    """Ask by connecting without a login: the answer of a server leaves out users that need no password."""
    stranger = Client()
    try:
        await asyncio.wait_for(
            stranger.connect(
                url,
                allow_reconnect=False,
                connect_timeout=2,
                error_cb=_ignore,
                **login.encryption(with_certificate=False),
            ),
            5.0,
        )
    except (TimeoutError, OSError, nats.errors.Error):
        return False
    await stranger.close()
    return True


async def _ignore(_: Exception) -> None:
    """The refusal is the answer that was wanted."""
