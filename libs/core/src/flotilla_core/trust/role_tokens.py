"""Tokens with a role: what a person or a program holds that may do less than the stack itself.

A token is `flotilla:ROLE:NAME:END:KEY`. The claims (role, name, end) are in the open, and the key is a keyed hash of
them under the secret of the stack.
Invariants: a service needs nothing but the secret to know every token that was made with it, so nothing is kept of
them; a token whose claims were changed has the wrong key; a role includes the ones below it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from dataclasses import dataclass
from typing import Self

from flotilla.common.v1.roles import ROLES
from flotilla_core.errors import FlotillaError, InvalidRequest, PermissionDenied, Unauthenticated

READ = "read"
RUN = "run"
ADMIN = "admin"
LADDER = (READ, RUN, ADMIN)
"""The roles, each of which may do what those before it may."""

_PREFIX = "flotilla"
_NEVER = "never"
_NAME = r"[A-Za-z0-9._@-]{1,64}"
_CLAIMS = re.compile(rf"(?P<role>{'|'.join(LADDER)}):(?P<name>{_NAME}):(?P<end>[0-9]{{1,12}}|{_NEVER})")


@dataclass(frozen=True)
class Claims:
    """The claims of a token with a role about its holder."""

    role: str
    name: str
    ends_s: int | None
    """Seconds since 1970 after which it is refused; None for a token without an end."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read the claims of a header; None for anything else."""
        match = _CLAIMS.fullmatch(text)
        if match is None:
            return None
        return cls(match["role"], match["name"], None if match["end"] == _NEVER else int(match["end"]))

    def __str__(self) -> str:
        return f"{self.role}:{self.name}:{_NEVER if self.ends_s is None else self.ends_s}"

    def refusal(self, method: str, *, fenced: bool = False) -> FlotillaError | None:
        """Return why the holder may not make this call; None lets it pass.

        No role may send a fence (`fenced`): whoever moves one shuts the coordinator out of its own run.
        """
        if self.ends_s is not None and time.time() >= self.ends_s:
            return Unauthenticated(
                f"the token of {self.name} (role {self.role}) has expired",
                where=method,
                why=f"it was good until {clock(self.ends_s)}",
                next_step=f"have the owner of the stack make another one: flotilla token create --role {self.role} "
                f"--name {self.name}",
            )
        needed = ROLES.get(method, ADMIN)
        if LADDER.index(self.role) < LADDER.index(needed):
            return PermissionDenied(
                f"the call needs the role {needed}, and the token of {self.name} has the role {self.role}",
                where=method,
                next_step=f"ask the owner of the stack, who can do it or make such a token: flotilla token create "
                f"--role {needed} --name {self.name}",
            )
        if fenced:
            return PermissionDenied(
                f"the call carries a fence, and the token of {self.name} has the role {self.role}",
                where=method,
                why="a fence says which coordinator owns a run, so only the stack's own token may send one",
                next_step="send the call without the header flotilla-fence",
            )
        return None


def make_role_token(secret: str, claims: Claims) -> str:
    """Return the token of these claims."""
    if Claims.parse(str(claims)) != claims:
        raise InvalidRequest(
            f"{claims.name[:80]!r} is no name of a holder",
            next_step="give 1 to 64 letters, digits and . _ @ - (for example ana or ci@example)",
        )
    if opened(secret) is not None:
        raise PermissionDenied(
            "a token with a role makes no other tokens",
            next_step="use the stack's own token: it is in the stack's directory (file `token`)",
        )
    return f"{_PREFIX}:{claims}:{key_of(secret, claims)}"


def opened(token: str) -> tuple[Claims, str] | None:
    """Return the claims and the key of a token with a role; None for the secret of a stack."""
    prefix, _, rest = token.partition(":")
    stated, _, key = rest.rpartition(":")
    claims = Claims.parse(stated) if prefix == _PREFIX else None
    return None if claims is None else (claims, key)


def key_of(secret: str, claims: Claims) -> str:
    """Return the key that the holder of these claims signs with."""
    root = hashlib.blake2b(secret.encode(), person=b"flotilla roles", digest_size=32).digest()
    return hmac.new(root, str(claims).encode(), hashlib.sha256).hexdigest()


def clock(moment_s: float) -> str:
    """Return a time as people read it; numbers that are no time stay numbers."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment_s))
    except (OverflowError, ValueError, OSError):
        return f"{moment_s:.0f} s"
