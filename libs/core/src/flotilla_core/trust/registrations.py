"""Registrations that only a process of the stack can have made.

Invariants: a reader never takes one again that it took, nor one that is older. So write access to the registry is not
enough to bring back an instance that is gone. A reader that has just begun takes none that is older than the clocks
of two hosts may differ. A clock that was wrong for a while costs nothing beyond that while: a process whose clock is
right again is taken within seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from flotilla.common.v1.registration_pb2 import Registration, SignedRegistration
from flotilla_core.trust.calls import TOLERANCE_MS
from flotilla_core.trust.secret_file import Token

_TOLERANCE_NS = TOLERANCE_MS * 1_000_000
_REFUSED_NS = _TOLERANCE_NS + 5_000_000_000
"""The lead over the clock beyond which every reader has refused a moment, though clocks differ by seconds; so for these
seconds at most a reader may refuse what comes after the clock is right."""


class RegistrationSigner:
    """Signs the registrations of one process."""

    def __init__(self, token: str | Token, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._token = Token.of(token)
        self._now_ns = now_ns
        self._last_ns = 0

    def sign(self, registration: Registration) -> bytes:
        """Return what the registry shall hold; each is newer than those before it that a reader took."""
        now = self._now_ns()
        # Moments of a clock that was far ahead were refused: counting on from there would be refused as well.
        self._last_ns = now if self._last_ns - now > _REFUSED_NS else max(now, self._last_ns + 1)
        content = registration.SerializeToString(deterministic=True)
        key = _derived(self._token.current())
        signature = _signature(key, registration.instance_id, self._last_ns, content)
        return SignedRegistration(
            registration=content, signed_at_ns=self._last_ns, signature=signature
        ).SerializeToString()


class RegistrationVerifier:
    """Judges what one reader finds in the registry."""

    def __init__(self, token: str | Token, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._token = Token.of(token)
        self._now_ns = now_ns
        self._newest_ns: dict[str, int] = {}

    def read(self, key: str, content: bytes) -> Registration | str | None:
        """Return the registration under `key`, why it is refused, or None for one that is no news."""
        try:
            signed = SignedRegistration.FromString(content)
        except DecodeError:
            return "it is not a signed registration"
        moment = signed.signed_at_ns
        if not any(
            hmac.compare_digest(
                signed.signature, _signature(_derived(secret), key, moment, signed.registration)
            )
            for secret in self._token.accepted()
        ):
            return "it is not signed with the secret of this stack"
        now = self._now_ns()
        if abs(now - moment) > _TOLERANCE_NS:
            return f"it was signed {abs(now - moment) / 1e9:.0f} s {'ago' if now > moment else 'from now'}"
        if moment <= self._newest_ns.get(key, 0):
            return None
        if key not in self._newest_ns:
            # What is older than this is refused by its age alone.
            self._newest_ns = {
                known: last for known, last in self._newest_ns.items() if now - last <= _TOLERANCE_NS
            }
        self._newest_ns[key] = moment
        return Registration.FromString(signed.registration)


def _derived(token: str) -> bytes:
    return hashlib.blake2b(token.encode(), person=b"flotilla regs", digest_size=32).digest()


def _signature(key: bytes, instance_id: str, moment_ns: int, content: bytes) -> bytes:
    stated = f"{instance_id} {moment_ns} ".encode()
    return hashlib.blake2b(stated + content, key=key, digest_size=32).digest()
