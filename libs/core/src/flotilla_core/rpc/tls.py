"""TLS between services: each end shows a certificate, which an authority of the stack has signed.

Invariants: certificates are files that may be replaced at any time: a server takes the new ones at its next
connection, and a channel at its next call, on a connection of its own; calls that run stay on theirs. A connection
that fails for a certificate is explained by the end that dialled: whose it is, until when it was good, what to do.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_core.logger import get_logger
from flotilla_core.trust import certificates
from flotilla_core.trust.certificates import TlsFiles

if TYPE_CHECKING:
    from flotilla_core.config.stack import TlsConfig

_PROBE_S = 2.0
# How long a replaced connection may finish its calls.
_FINISH_S = 24 * 3600.0
# How long a look at an address tells of it: a lost service breaks all calls to it at once.
_LOOK_AGAIN_S = 10.0
_LOOKS: dict[tuple[str, str, int], tuple[float, asyncio.Future[FlotillaError | None]]] = {}
_SIGNS = (
    "handshake",
    "verification",
    "ssl",
    "tls",
    "certificate",
    "socket closed",
    "connection reset",
    "end of tcp stream",
)

logger = get_logger()


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Return the credentials of a server that asks each caller for a certificate."""
    files = TlsFiles(tls)

    def configured(read: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
        key, chain, authorities = read
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        read = files.read_again()
        return None if read is None else configured(read)

    # None for "as before" is the documented answer, which the stubs do not know.
    return grpc.dynamic_ssl_server_credentials(
        configured(files.read()),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


def channel_credentials(read: tuple[bytes, bytes, bytes]) -> grpc.ChannelCredentials:
    """Return the credentials of a channel by what the three files hold."""
    key, chain, authorities = read
    return grpc.ssl_channel_credentials(authorities, key, chain)


class RenewedChannel(grpc.aio.Channel):
    """A channel over TLS, whose calls go over a new connection once the certificate was replaced."""

    def __init__(self, files: TlsFiles, dial: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._files = files
        self._dial = dial
        self._channel = dial(channel_credentials(files.read()))
        self._ending: dict[asyncio.Future[None], grpc.aio.Channel] = {}

    def current(self) -> grpc.aio.Channel:
        """Return the channel of the newest certificate."""
        read = self._files.read_again()
        if read is not None:
            replaced, self._channel = self._channel, self._dial(channel_credentials(read))
            ending = asyncio.ensure_future(replaced.close(_FINISH_S))
            self._ending[ending] = replaced
            ending.add_done_callback(lambda done: self._ending.pop(done, None))
        return self._channel

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        replaced, self._ending = self._ending, {}
        for ending, channel in replaced.items():
            ending.cancel()
            await channel.close(grace)
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *given: Any, **options: Any) -> Any:
        return _RenewedMethod(self, "unary_unary", given, options)

    def unary_stream(self, *given: Any, **options: Any) -> Any:
        return _RenewedMethod(self, "unary_stream", given, options)

    def stream_unary(self, *given: Any, **options: Any) -> Any:
        return _RenewedMethod(self, "stream_unary", given, options)

    def stream_stream(self, *given: Any, **options: Any) -> Any:
        return _RenewedMethod(self, "stream_stream", given, options)


class _RenewedMethod:
    """One method of a stub, on whatever channel is the current one."""

    def __init__(self, channel: RenewedChannel, kind: str, given: Any, options: Any) -> None:
        self._channel = channel
        self._made = (kind, given, options)
        self._on: grpc.aio.Channel | None = None
        self._method: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        current = self._channel.current()
        if current is not self._on:
            kind, given, made = self._made
            self._method, self._on = getattr(current, kind)(*given, **made), current
        return self._method(*arguments, **options)


async def explain(address: str, tls: TlsConfig | None, error: FlotillaError) -> FlotillaError:
    """Return what a certificate has to do with a failed connection; the error itself where nothing."""
    if not isinstance(error, Unavailable) or not any(sign in error.why.lower() for sign in _SIGNS):
        return error
    found = await _looked_at(address, tls, error)
    if found is None:
        return error
    return Unavailable(found.what, where=found.where, why=found.why, next_step=found.next_step)


async def _looked_at(address: str, tls: TlsConfig | None, error: FlotillaError) -> FlotillaError | None:
    """Return what one look at the address finds; callers whose calls broke at the same time share it."""
    loop, now = asyncio.get_running_loop(), time.monotonic()
    for old in [key for key, (then, _) in _LOOKS.items() if now - then > _LOOK_AGAIN_S]:
        del _LOOKS[old]
    key = address, "" if tls is None else tls.model_dump_json(), id(loop)
    if key not in _LOOKS:
        _LOOKS[key] = now, asyncio.ensure_future(asyncio.to_thread(_explained, address, tls, error))
    return await asyncio.shield(_LOOKS[key][1])


def _explained(address: str, tls: TlsConfig | None, error: FlotillaError) -> FlotillaError | None:
    """Return why no connection is made where that is a matter of TLS; None for every other reason.

    A service that starts or ends closes connections too: without a certificate that is wrong, that says nothing.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    refused, is_tls = "", True
    theirs: bytes | None = None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        if tls is not None:
            TlsFiles(tls).read()
            context.load_cert_chain(tls.certificate_file, tls.key_file)
        with socket.create_connection((host, int(port)), _PROBE_S) as plain:
            plain.settimeout(_PROBE_S)
            with context.wrap_socket(plain, server_hostname=host) as connection:
                theirs = connection.getpeercert(binary_form=True)
                # With TLS 1.3 a server refuses our certificate after the handshake; else it sends its settings.
                refused = "" if connection.recv(1) else "it closes the connection"
    except FlotillaError as ours:
        return ours
    except TimeoutError:
        pass
    except (ssl.SSLError, ConnectionError) as failure:
        # A process that is killed ends its connections in the middle, too: its answer alone says what it speaks.
        is_tls = isinstance(failure, ssl.SSLEOFError | ConnectionError)
        refused = str(failure)
    except (OSError, ValueError):
        return None
    if tls is None:
        return (
            None
            if theirs is None
            else _speaks(address, error, "TLS", "which bind.tls of our stack file lacks")
        )
    if theirs is None:
        return (
            None
            if is_tls
            else _speaks(address, error, "no TLS", "and bind.tls of our stack file asks for it")
        )
    return _of_certificates(address, host, tls, theirs, refused)


def _of_certificates(
    address: str, host: str, tls: TlsConfig, theirs: bytes, refused: str
) -> FlotillaError | None:
    from cryptography import x509

    certificate = x509.load_der_x509_certificate(theirs)
    problem = certificates.problem_of(certificate, certificates.read_certificates(tls.ca_file))
    if not problem and not certificates.is_for(certificate, host):
        problem = f"{certificates.who(certificate)} is not for {host}"
    if problem:
        return Unavailable(
            f"the service at {address} shows a certificate that is not good",
            where=address,
            why=problem,
            next_step="on its host: flotilla certs init --hosts with every name by which it is dialled, and copy the "
            "files to the place that its bind.tls names",
        )
    if refused:
        ours = certificates.read_certificates(tls.certificate_file)[0]
        return Unavailable(
            f"the service at {address} does not take our certificate",
            where=f"bind.tls.certificate_file {tls.certificate_file}",
            why=f"we show {certificates.who(ours)}, good until {ours.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            f"its answer: {refused}",
            next_step="make certificates of both hosts by one authority: flotilla certs init; and set their clocks",
        )
    return None


def _speaks(address: str, error: FlotillaError, what: str, lack: str) -> FlotillaError:
    return Unavailable(
        f"the service at {address} speaks {what}, {lack}",
        where=error.where,
        why=error.why,
        next_step="use one stack file on all hosts: with bind.tls everywhere, or nowhere",
    )
