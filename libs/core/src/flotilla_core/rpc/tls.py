"""TLS between services: each end shows a certificate, which an authority of the stack has signed.

Invariants: a credential may be replaced at any time: a server takes the new one at its next connection, and a channel
at its next call, on a connection of its own; calls that run stay on theirs. A connection that fails for a certificate
is explained by the end that dialled: whose it is, until when it was good, what to do.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from flotilla_core.errors import FlotillaError, InvalidConfig, Unavailable
from flotilla_core.telemetry.grpc import Metadata, TracedChannel
from flotilla_core.trust import Credential, Pem
from flotilla_core.trust.roles import SERVER_NAME

_PROBE_S = 2.0
# A call to a rank lasts as long as the rank.
_FINISH_S = 10 * 365 * 24 * 3600.0
# How long a look at an address tells of it: a lost service breaks all calls to it at once.
_LOOK_AGAIN_S = 10.0
_LOOKS: dict[tuple[str, str, int], tuple[float, asyncio.Future[FlotillaError | None]]] = {}
_SIGNS = re.compile(
    "handshake|verification|ssl|tls|certificate|socket closed|connection reset|end of tcp stream", re.I
)


def server_credentials(credential: Credential) -> grpc.ServerCredentials:
    """Return the credentials of a server that asks each caller for a certificate."""
    shown = credential.current()

    def configured(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.authorities)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        newest = credential.current()
        if newest is shown:
            return None
        shown = newest
        return configured(newest)

    # None for "as before" is the documented answer, which the stubs do not know.
    return grpc.dynamic_ssl_server_credentials(
        configured(shown),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


class RenewedChannel(TracedChannel):
    """A channel over TLS, whose calls go over a new connection once the credential was replaced."""

    def __init__(
        self,
        credential: Credential,
        dial: Callable[[Pem], grpc.aio.Channel],
        metadata: Callable[[str], Metadata],
        explain: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self._credential = credential
        self._dial = dial
        self._shown = credential.current()
        self._ending: dict[asyncio.Future[None], grpc.aio.Channel] = {}
        super().__init__(dial(self._shown), metadata, explain)

    def _starting(self, kind: str, *given: Any, **options: Any) -> Callable[..., Any]:
        start, channel = super()._starting(kind, *given, **options), self._channel

        def start_on_the_newest(*arguments: Any, **of_call: Any) -> Any:
            nonlocal start, channel
            self._renew()
            if channel is not self._channel:
                start, channel = super(RenewedChannel, self)._starting(kind, *given, **options), self._channel
            return start(*arguments, **of_call)

        return start_on_the_newest

    def _renew(self) -> None:
        newest = self._credential.current()
        if newest is self._shown:
            return
        self._shown = newest
        replaced, self._channel = self._channel, self._dial(newest)
        ending = asyncio.ensure_future(replaced.close(_FINISH_S))
        self._ending[ending] = replaced
        ending.add_done_callback(lambda done: self._ending.pop(done, None))

    async def close(self, grace: float | None = None) -> None:
        replaced, self._ending = self._ending, {}
        for ending, channel in replaced.items():
            ending.cancel()
            await channel.close(grace)
        await super().close(grace)


async def explain(address: str, credential: Credential, error: FlotillaError) -> FlotillaError:
    """Return what a certificate has to do with a failed connection; the error itself where nothing."""
    if not isinstance(error, Unavailable) or not _SIGNS.search(error.why):
        return error
    # One look is shared by all callers whose calls broke at the same time.
    loop, now = asyncio.get_running_loop(), time.monotonic()
    for old in [key for key, (then, _) in _LOOKS.items() if now - then > _LOOK_AGAIN_S]:
        del _LOOKS[old]
    key = address, str(credential.path), id(loop)
    if key not in _LOOKS:
        _LOOKS[key] = now, asyncio.ensure_future(asyncio.to_thread(broken_by, address, credential))
    found = await asyncio.shield(_LOOKS[key][1])
    return error if found is None else found.again()


def broken_by(address: str, credential: Credential) -> FlotillaError | None:
    """Return why no connection is made where that is a matter of TLS; None for every other reason.

    A service that starts or ends closes connections too: without a certificate that is wrong, that says nothing.
    """
    from flotilla_core.trust import certificates

    try:
        ours = credential.read()
    except FlotillaError as unreadable:
        return unreadable
    if problem := certificates.own_problem(ours):
        return InvalidConfig(
            "our own certificate is not good",
            where=f"{credential.key} {credential.path}",
            why=problem,
            next_step="have the owner of the stack make another one: flotilla token create",
        )
    shown, failure = _shown(address, credential, ours, verified=True)
    if isinstance(failure, ssl.SSLCertVerificationError):
        shown, _ = _shown(address, credential, ours, verified=False)
        why = certificates.problem_of_service(shown, ours) if shown else ""
        return Unavailable(
            f"the service at {address} shows a certificate that is not good",
            where=address,
            why=why or failure.verify_message,
            next_step="copy the stack's credential to that host; where it was replaced there, copy it to "
            f"{credential.path}, or have its owner make another one: flotilla token create",
        )
    if shown is not None and failure is not None:
        own = certificates.own(ours)
        return Unavailable(
            f"the service at {address} does not take our certificate",
            where=f"{credential.key} {credential.path}",
            why=f"we show {certificates.who(own)}, good until {own.not_valid_after_utc}; its answer: {failure}",
            next_step="copy the stack's credential to both hosts, or have its owner make another one (flotilla token "
            "create); and set their clocks",
        )
    # A process that is killed ends its connections in the middle, too: its answer alone says what it speaks.
    if not isinstance(failure, ssl.SSLError) or isinstance(failure, ssl.SSLEOFError):
        return None
    return Unavailable(
        f"what answers at {address} speaks no TLS",
        where=address,
        why=f"all services of this release do; its answer: {failure}",
        next_step="stop what listens there; where it is an older Flotilla, run the same release everywhere",
    )


def _shown(
    address: str, credential: Credential, ours: Pem, *, verified: bool
) -> tuple[bytes | None, Exception | None]:
    """Return the certificate that is shown at an address, and what broke the connection; each may be missing."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cadata=ours.authorities.decode())
    if not verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    theirs: bytes | None = None
    try:
        context.load_cert_chain(*credential.files[:2])
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as plain:
            plain.settimeout(_PROBE_S)
            with context.wrap_socket(plain, server_hostname=SERVER_NAME) as connection:
                theirs = connection.getpeercert(binary_form=True)
                # With TLS 1.3 a server refuses our certificate after the handshake; else it sends its settings.
                if not connection.recv(1):
                    return theirs, ConnectionError("it closes the connection")
    except TimeoutError:
        return theirs, None
    except (OSError, ValueError) as failure:
        return theirs, failure
    return theirs, None
