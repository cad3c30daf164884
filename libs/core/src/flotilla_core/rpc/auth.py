"""The bearer token of a stack.

Invariant: an address beyond loopback is never served without a token.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from flotilla_core.errors import InvalidConfig

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

TOKEN_HEADER = "authorization"


def read_token(bind: BindConfig) -> str | None:
    """The stack's token, or None on a loopback stack without one."""
    if bind.token_file is None:
        require_token(bind, None)
        return None
    try:
        token = bind.token_file.read_text().strip()
    except OSError as error:
        raise InvalidConfig(
            "cannot read the stack's token",
            where=f"bind.token_file {bind.token_file}",
            why=str(error.strerror),
        ) from error
    if not token:
        raise InvalidConfig("the stack's token is empty", where=f"bind.token_file {bind.token_file}")
    return token


def require_token(bind: BindConfig, token: str | None) -> None:
    """Raise InvalidConfig for an address beyond loopback without a token."""
    if token is None and not is_loopback(bind.host):
        raise InvalidConfig(
            "bind.token_file is not set",
            where=f"bind.host {bind.host}",
            why="an address beyond loopback is never served without a token",
            next_step="Write a random token to a file (mode 0600) and name it in bind.token_file, "
            "or bind to 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine alone."""
    if host.startswith("unix:"):
        return True  # A socket file: its directory's permissions decide who may connect.
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller sends with every call."""
    return ((TOKEN_HEADER, f"Bearer {token}"),)
