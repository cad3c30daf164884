"""The names in a certificate: who its holder is, and what a person or a program may do that is not the stack itself.

A certificate names its holder in the open: `service.flotilla` as a DNS name is the stack itself, and the URI
`flotilla:ROLE:NAME:END` a holder with a role.
Invariants: a service needs nothing but its authority to know every holder, so nothing is kept of them; a name that is
not exactly one of these is nobody's; a role includes the ones below it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

from flotilla.common.v1.roles import ROLES
from flotilla_core.errors import FlotillaError, PermissionDenied, Unauthenticated

READ = "read"
RUN = "run"
ADMIN = "admin"
LADDER = (READ, RUN, ADMIN)
"""The roles, each of which may do what those before it may."""

SERVICE: Literal["service"] = "service"
SERVER_NAME = "service.flotilla"
"""The name by which every client checks the server that it dialled, whatever its address is."""
Shown: TypeAlias = Mapping[str, Iterable[bytes]]
"""What gRPC says of a certificate that was shown: its names by their sort."""
PREFIX = "flotilla:"
"""The beginning of the URI that names a holder with a role."""

_NEVER = "never"
_NAME = r"[A-Za-z0-9._@-]{1,64}"
_CLAIMS = re.compile(rf"(?P<role>{'|'.join(LADDER)}):(?P<name>{_NAME}):(?P<end>[0-9]{{1,12}}|{_NEVER})")


@dataclass(frozen=True)
class Claims:
    """The claims of a certificate with a role about its holder."""

    role: str
    name: str
    ends_s: int | None
    """Seconds since 1970 after which it is refused; None for a certificate without an end."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read the claims behind the prefix of a URI; None for anything else."""
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
                f"the credential of {self.name} (role {self.role}) has expired",
                where=method,
                why=f"it was good until {clock(self.ends_s)}",
                next_step=f"have the owner of the stack make another one: flotilla token create --role {self.role} "
                f"--name {self.name} -o {self.name}.pem",
            )
        needed = ROLES.get(method, ADMIN)
        if LADDER.index(self.role) < LADDER.index(needed):
            return PermissionDenied(
                f"the call needs the role {needed}, and the credential of {self.name} has the role {self.role}",
                where=method,
                next_step="ask the owner of the stack, who can do it or make such a credential: flotilla token create "
                f"--role {needed} --name {self.name} -o {self.name}.pem",
            )
        if fenced:
            return PermissionDenied(
                f"the call carries a fence, and the credential of {self.name} has the role {self.role}",
                where=method,
                why="a fence says which coordinator owns a run, so only the stack itself may send one",
                next_step="send the call without the header flotilla-fence",
            )
        return None


def identity(shown: Shown) -> Claims | Literal["service"] | None:
    """Return who a certificate says that its holder is: a role, the stack itself, or nobody.

    Other sorts of names, which an authority may leave to the one who asks, count for nothing.
    """
    for uri in shown.get("peer_uri", ()):
        name = uri.decode("ascii", "replace")
        if name.startswith(PREFIX):
            # With a role beside it, the name of the stack counts for nothing.
            return Claims.parse(name.removeprefix(PREFIX))
    return SERVICE if SERVER_NAME.encode() in shown.get("peer_dns", ()) else None


def refusal(shown: Shown, method: str, *, fenced: bool) -> FlotillaError | None:
    """Return why a caller who has shown such a certificate may not make this call; None lets it pass."""
    caller = identity(shown)
    if isinstance(caller, Claims):
        return caller.refusal(method, fenced=fenced)
    if caller is SERVICE:
        return None
    return Unauthenticated(
        "the certificate of the caller names neither a service nor a role",
        where=method,
        why=f"it has to be for {SERVER_NAME}, or for {PREFIX}ROLE:NAME:END",
        next_step="use the stack's own credential, or have its owner make one: flotilla token create",
    )


def clock(moment_s: float) -> str:
    """Return a time as people read it; numbers that are no time stay numbers."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment_s))
    except (OverflowError, ValueError, OSError):
        return f"{moment_s:.0f} s"
