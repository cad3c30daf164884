"""The proof of a caller to a service that it has the secret of the stack, without sending it.

Every call carries `authorization: Flotilla TIME SENDER COUNT ADDRESS SIGNATURE`: a keyed BLAKE2b, at a third of the
cost of an HMAC, by a key derived from the secret, over the call's method and those four fields. ADDRESS is quoted as in
a URL, because the path of a socket may hold what a header cannot. The holder of a token with a role sends its claims
before TIME, and signs by the key of its token (`role_tokens`).
Invariants: a signature is good once while the service runs, for one method, at the address that was dialled and for
five minutes, so a process that receives it in place of the service cannot use it; a service keeps a bounded memory for
each sender that has proven itself, and none for others.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import time
from collections.abc import Callable
from urllib.parse import quote, unquote

from flotilla_core.errors import FlotillaError, Unauthenticated, Unavailable
from flotilla_core.trust.role_tokens import Claims, clock, key_of, opened
from flotilla_core.trust.secret_file import Token

HEADER = "authorization"
SCHEME = "Flotilla"
TOLERANCE_MS = 300_000
"""Limit on the difference between the clocks of a caller and a service."""
WINDOW = 8192
"""Limit on how far calls of one sender may overtake each other."""
_FORGET_AFTER_MS = 2 * TOLERANCE_MS
_LONGEST_NUMBER = 18
_LONGEST_SENDER = 32
_WHOLE_WINDOW = (1 << WINDOW) - 1
_AS_THEY_ARE = "/:[]@"


class CallSigner:
    """Signs the calls of one channel."""

    def __init__(self, token: str | Token, address: str) -> None:
        self._token = Token.of(token)
        self._known = ""
        self._claims = ""
        self._key = b""
        self._address = quote(address, safe=_AS_THEY_ARE)
        self._sender = secrets.token_hex(8)
        self._counts = itertools.count(1)

    def sign(self, method: str) -> str:
        """Return the value of the header for one call of `method` (/package.Service/Method)."""
        token = self._token.current()
        if token != self._known:
            self._take(token)
        stated = f"{time.time_ns() // 1_000_000} {self._sender} {next(self._counts)} {self._address}"
        return f"{SCHEME} {self._claims}{stated} {_signature(self._key, method, stated)}"

    def _take(self, token: str) -> None:
        """Sign by this token from now on."""
        role = opened(token)
        self._claims = f"{role[0]} " if role else ""
        self._key = _derived(role[1] if role else token)
        self._known = token


class CallVerifier:
    """Judges the calls that reach one server."""

    def __init__(
        self, token: str | Token, names: Callable[[], frozenset[str]], *, shares_our_clock: bool = False
    ) -> None:
        """`names` returns the addresses that are the server's own.

        Where every caller shares the clock of the server, a call that was signed before the server began is refused:
        another process may have had the address then.
        """
        self._token = Token.of(token)
        self._names = names
        self._known_names: frozenset[str] = frozenset()
        self._senders: dict[str, _Sender] = {}
        self._swept_ms = 0
        self._began_ms = _uptime_ms() if shares_our_clock else None
        self._keys: dict[str, bytes] = {}
        """The key that is derived from each accepted secret."""

    def refusal(self, method: str, given: str | bytes, *, fenced: bool = False) -> FlotillaError | None:
        """Return why a call with this header is refused; None lets it pass, and counts it.

        `fenced` says that the call carries a fence, which only the stack's own secret may send.
        """
        text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
        match text.split(" "):
            case [scheme, moment, sender, count, address, signature] if scheme == SCHEME:
                claims = None
            case [scheme, role, moment, sender, count, address, signature] if scheme == SCHEME:
                claims = Claims.parse(role)
                if claims is None:
                    return unproven(method)
            case _:
                return self._judged_bearer(method, text, fenced)
        if (
            not self._is_signed(claims, method, f"{moment} {sender} {count} {address}", signature)
            or not moment.isdecimal()
            or not count.isdecimal()
            or max(len(moment), len(count)) > _LONGEST_NUMBER
            or len(sender) > _LONGEST_SENDER
        ):
            return unproven(method)
        if claims is not None and (refusal := claims.refusal(method, fenced=fenced)) is not None:
            return refusal
        # A holder of a token must not use up the calls of another sender.
        return self._judged(method, int(moment), f"{claims or ''} {sender}", int(count), unquote(address))

    def _is_signed(self, claims: Claims | None, method: str, stated: str, signature: str) -> bool:
        """Return whether a secret that is accepted now, or the key of these claims under it, made the signature."""
        accepted = self._token.accepted()
        if claims is None:
            if self._keys.keys() != set(accepted):
                self._keys = {secret: _derived(secret) for secret in accepted}
            keys = [self._keys[secret] for secret in accepted]
        else:
            keys = [_derived(key_of(secret, claims)) for secret in accepted]
        given = signature.encode()
        return any(hmac.compare_digest(given, _signature(key, method, stated).encode()) for key in keys)

    def _judged_bearer(self, method: str, text: str, fenced: bool) -> FlotillaError | None:
        """Judge a tool that is not ours (grpcurl), whose user chose to send the token itself."""
        scheme, _, token = text.partition(" ")
        role = opened(token)
        for secret in self._token.accepted():
            expected = secret if role is None else key_of(secret, role[0])
            given = token if role is None else role[1]
            if scheme == "Bearer" and hmac.compare_digest(given.encode(), expected.encode()):
                return None if role is None else role[0].refusal(method, fenced=fenced)
        return unproven(method)

    def _judged(
        self, method: str, moment: int, sender: str, count: int, address: str
    ) -> FlotillaError | None:
        """Judge what a caller that knows the secret has stated."""
        now = _now_ms()
        if abs(now - moment) > TOLERANCE_MS:
            # Not for good: it is over as soon as both clocks are right.
            return Unavailable(
                "the clocks of caller and service differ",
                where=method,
                why=f"the caller's says {clock(moment / 1000)}, the service's {clock(now / 1000)}, and a call is good "
                f"for {TOLERANCE_MS // 60_000} minutes",
                next_step="set the clocks of both hosts, for example by NTP",
            )
        if address not in self._known_names and address not in self._own_names():
            return Unauthenticated(
                f"the call was signed for {address}",
                where=method,
                why=f"this service is {', '.join(sorted(self._known_names))}",
                next_step="dial the service by one of these addresses, or set bind.advertise_host to the host by "
                "which its callers know it",
            )
        if self._began_ms is not None and now - moment > _uptime_ms() - self._began_ms:
            return Unavailable(
                "the call was signed before this service began",
                where=method,
                why="another process may have had its address then",
                next_step="call again",
            )
        if not self._sender(sender).takes(count):
            return Unauthenticated(
                "the call was received before",
                where=method,
                why="a signature is good once",
                next_step="send a new call",
            )
        return None

    def _own_names(self) -> frozenset[str]:
        """Resolve the name again: a host may have got another address since."""
        self._known_names = self._names()
        return self._known_names

    def _sender(self, name: str) -> _Sender:
        known, now = self._senders.get(name), _uptime_ms()
        if known is None:
            if now - self._swept_ms > TOLERANCE_MS:
                self._swept_ms = now
                self._senders = {
                    key: one for key, one in self._senders.items() if now - one.heard_ms < _FORGET_AFTER_MS
                }
            known = self._senders[name] = _Sender()
        known.heard_ms = now
        return known


class _Sender:
    """The accepted calls of one sender: a window that moves with the newest of them."""

    def __init__(self) -> None:
        self.heard_ms = 0
        self._newest = 0
        self._taken = 0
        """A bit for each number of the window that was taken, the newest in the lowest one."""

    def takes(self, count: int) -> bool:
        """Return whether this is the first call of that number; it is taken then."""
        if count > self._newest:
            further = count - self._newest
            kept = self._taken << further if further < WINDOW else 0
            self._taken = (kept | 1) & _WHOLE_WINDOW
            self._newest = count
            return True
        behind = self._newest - count
        if behind >= WINDOW or self._taken >> behind & 1:
            return False
        self._taken |= 1 << behind
        return True


def unproven(method: str) -> Unauthenticated:
    """Return the refusal of a call that proves nothing."""
    return Unauthenticated(
        "the call does not prove that its caller belongs to this stack",
        where=method,
        why="every call is signed with the stack's token, or carries it (authorization: Bearer TOKEN)",
        next_step="the token is in the stack's directory (file `token`), or in the file that bind.token_file names; "
        "call as the user who owns the stack",
    )


def _derived(token: str) -> bytes:
    return hashlib.blake2b(token.encode(), person=b"flotilla calls", digest_size=32).digest()


def _signature(key: bytes, method: str, stated: str) -> str:
    return hashlib.blake2b(f"{method} {stated}".encode(), key=key, digest_size=32).hexdigest()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _uptime_ms() -> int:
    """Return the time by a clock that nobody sets, for durations."""
    return time.monotonic_ns() // 1_000_000
