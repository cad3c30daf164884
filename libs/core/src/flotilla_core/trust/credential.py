"""A credential: our certificate, its private key and the authorities that we trust.

It is one PEM file in this order, or a folder with `tls.crt`, `tls.key` and `ca.crt`, as cert-manager and Kubernetes
write them. A line `# trusted until SECONDS` (since 1970) before a certificate ends the use of that one.
Invariants: it is read as files of secrets are; a replaced one is used once it is complete, and until then what was read
before; a certificate is left out from the moment on at which its time has ended.
"""

from __future__ import annotations

import logging
import math
import os
import re
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flotilla_core.errors import FlotillaError, InvalidConfig, Unavailable
from flotilla_core.trust.private_files import read_secret
from flotilla_core.trust.roles import SERVER_NAME

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

CREDENTIAL_FILE = "credential.pem"
"""The file of the stack's own credential, in the stack's directory."""
UNTIL = "# trusted until "
_FOLDER = ("tls.crt", "tls.key", "ca.crt")
_BLOCK = re.compile(
    rf"(?:^{UNTIL}(?P<end>[0-9]{{1,12}})\s*\n)?"
    r"^(?P<text>-----BEGIN (?P<label>[A-Z0-9 ]+)-----$.*?^-----END (?P=label)-----$)",
    re.MULTILINE | re.DOTALL,
)
_TELL_EVERY_S = 60.0
_WRONG_PURPOSE = 26  # OpenSSL: X509_V_ERR_INVALID_PURPOSE

logger = logging.getLogger(__name__)


class Pem(NamedTuple):
    """A credential, in the order in which gRPC takes it."""

    authorities: bytes
    key: bytes
    chain: bytes


class Block(NamedTuple):
    """One block of a PEM text."""

    is_key: bool
    text: str
    ends_s: float
    """Seconds since 1970 after which it is not used."""


def blocks(text: str) -> list[Block]:
    """Return the blocks of a PEM text whose time has not ended."""
    text = text.replace("\r\n", "\n")
    matches = list(_BLOCK.finditer(text))
    if sum(match["end"] is not None for match in matches) != text.count(UNTIL.strip("# ")):
        raise InvalidConfig(
            "the end of a certificate in a credential cannot be read",
            why=f"`{UNTIL}SECONDS` stands on the line before the certificate that it ends",
            next_step="copy the whole credential again",
        )
    return _not_ended(
        Block(match["label"].endswith("PRIVATE KEY"), match[0] + "\n", float(match["end"] or math.inf))
        for match in matches
    )


class Credential:
    """The credential in one place, which may be replaced at any time."""

    def __init__(self, path: Path, key: str = "the credential", *, is_made: bool = False) -> None:
        """`key` is what errors call it; `is_made` says that the start of the stack makes it."""
        self.path = path.absolute()
        self.key = key
        names = _FOLDER if os.path.isdir(self.path) else ("", "", "")
        certificate, key_file, authorities = (self.path / name for name in names)
        self.files = certificate, key_file, authorities
        """The files of certificate, key and authorities, which may be one."""
        self._is_made = is_made
        self._serves = ""
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        self._known: Pem | None = None
        self._mark: tuple[int, ...] = ()
        self._told_s = -_TELL_EVERY_S

    @classmethod
    def of_stack(cls, bind: BindConfig, directory: Path) -> Credential:
        """Return the credential of the stack whose files are in `directory`.

        Services, the command line, the SDK and tools all find it here: in the place that `bind.credential_file` names,
        else in the file that `flotilla up` made.
        """
        if bind.credential_file is not None:
            return cls(bind.credential_file, "bind.credential_file")
        return cls(directory / CREDENTIAL_FILE, "the stack's credential", is_made=True)

    def read(self) -> Pem:
        """Return what the file holds now; raise InvalidConfig or Unavailable for what no peer would take."""
        return _pem(self._read())

    def current(self) -> Pem:
        """Return what the file holds, the same object until that changes, to all threads.

        A file that cannot be used, which is told once a minute, changes nothing.
        """
        with self._lock:
            mark, known = self._looked(), self._known
            has_ended = any(time.time() >= block.ends_s for block in self._blocks)
            if known is not None and mark in ((), self._mark) and not has_ended:
                return known
            try:
                self._blocks, self._mark = self._read(), mark
            except (FlotillaError, OSError) as error:
                if known is None:
                    raise
                # It is read again at the next call, because a shared disk may have been at fault.
                if time.monotonic() - self._told_s >= _TELL_EVERY_S:
                    self._told_s = time.monotonic()
                    logger.warning("the replaced credential is not used: %s", error)
                if not has_ended:
                    return known
                self._blocks = _not_ended(self._blocks)
            self._known = _pem(self._blocks)
            return self._known

    def require_service(self, where: str) -> None:
        """Raise InvalidConfig where no client would take this for the credential of a service of the stack.

        From now on nothing else is read in its place.
        """
        self._serves = where
        self.read()

    def _looked(self) -> tuple[int, ...]:
        """Return by what a replacement is noticed; empty while the files are being replaced."""
        try:
            seen = [os.stat(path) for path in dict.fromkeys(self.files)]
        except OSError:
            return ()
        return tuple(
            part for one in seen for part in (one.st_ino, one.st_mtime_ns, one.st_ctime_ns, one.st_size)
        )

    def _read(self) -> list[Block]:
        """Return the content, which is checked."""
        where, key_file = f"{self.key} {self.path}", self.files[1]
        try:
            # One after the other they are what one file would be.
            found = blocks(
                "\n".join(
                    read_secret(path, self.key, is_public=path != key_file)
                    for path in dict.fromkeys(self.files)
                )
            )
        except InvalidConfig:
            if not self._is_made or os.path.lexists(self.path):
                raise
            raise Unavailable(
                "the stack has no credential",
                where=str(self.path),
                why="it has not been started here yet, or an older Flotilla started it",
                next_step="start it: flotilla up (where it runs already: flotilla down first). On another host: copy "
                "its credential.pem to this place, or name a copy in bind.credential_file",
            ) from None
        keys = [place for place, block in enumerate(found) if block.is_key]
        if len(keys) != 1 or not 0 < keys[0] < len(found) - 1:
            raise InvalidConfig(
                "the file is no credential",
                where=where,
                why="it has to hold a certificate, its private key and the certificate of an authority, in this order",
                next_step="have the owner of the stack make one (flotilla token create), or copy the stack's own",
            )
        wrong = "the key does not belong to the certificate"
        try:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # The empty password keeps OpenSSL from asking for one.
            server.load_cert_chain(*self.files[:2], password="")
            wrong = "an authority of the credential cannot be read"
            client = ssl.create_default_context(cadata=_pem(found).authorities.decode())
        except ssl.SSLError as error:
            raise InvalidConfig(
                wrong, where=where, why=str(error), next_step="copy the whole credential again"
            ) from None
        if self._serves:
            _meet(client, server, f"{self._serves}: {where}")
        return found


def _meet(client: ssl.SSLContext, server: ssl.SSLContext, where: str) -> None:
    """Try the credential of a service as clients will try it: by a handshake with ourselves."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        is_role = error.verify_code == _WRONG_PURPOSE
        raise InvalidConfig(
            "a credential with a role is for callers" if is_role else "no client would take this credential",
            where=where,
            why="a service shows the credential of the stack itself" if is_role else error.verify_message,
            next_step="name the stack's own credential in bind.credential_file, or leave the key out; flotilla "
            "token rotate makes a new one",
        ) from None


def _pem(found: list[Block]) -> Pem:
    key = next(place for place, block in enumerate(found) if block.is_key)
    parts = found[key + 1 :], found[key : key + 1], found[:key]
    return Pem(*("".join(block.text for block in part).encode() for part in parts))


def _not_ended(found: Iterable[Block]) -> list[Block]:
    return [block for block in found if time.time() < block.ends_s]
