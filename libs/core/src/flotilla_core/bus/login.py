"""What a process shows to a NATS server.

Invariants: a password or token is read from its file at each connection, for the stack's own server has a new one at
each of its starts; it is on no command line and in no environment variable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.trust import read_secret

if TYPE_CHECKING:
    from flotilla_core.config.stack import NatsConfig

OWN_FILE = Path("nats") / "credentials"
"""Of the stack's own server, in the stack's directory."""
_KEY = "nats.credentials_file"


class Login:
    """How to connect to one server."""

    def __init__(self, file: Path | None, key: str = _KEY, *, insecure: bool = False) -> None:
        """`insecure` says that a server which takes anybody will do."""
        self.insecure = insecure
        self._file = file
        self._key = key

    @classmethod
    def of_stack(cls, nats: NatsConfig, directory: Path) -> Login:
        """Return the login of a process of the stack whose files are in `directory`."""
        if nats.url is None:
            return cls(directory / OWN_FILE, "the credentials of the stack's NATS server")
        return cls(nats.credentials_file, insecure=nats.insecure)

    def options(self) -> dict[str, Any]:
        """Return what the NATS client takes; raise InvalidConfig where the file does not hold it."""
        if self._file is None:
            return {}
        if self._read()[0]:
            return {"user": self._later(0), "password": self._later(1)}
        return {"token": self._later(1)}

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
