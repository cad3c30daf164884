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
_KEY = "PRIVATE KEY"
_BLOCK = re.compile(
    rf"(?:^{UNTIL}(?P<end>[0-9]{{1,12}})\s*\n)?"
    r"^(?P<text>-----BEGIN (?P<label>[A-Z0-9 ]+)-----$.*?^-----END (?P=label)-----$)",
    re.MULTILINE | re.DOTALL,
)
_TELL_EVERY_S = 60.0
_WRONG_PURPOSE = 26  # OpenSSL: X509_V_ERR_INVALID_PURPOSE

logger = logging.getLogger(__name__)


class Pem(NamedTuple):
    """A credential, as gRPC takes it."""

    key: bytes
    chain: bytes
    authorities: bytes


class Block(NamedTuple):
    """One block of a PEM text."""

    label: str
    text: str
    ends_s: float
    """Seconds since 1970 after which it is not used."""

    @property
    def is_key(self) -> bool:
        return self.label.endswith(_KEY)


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
    found = (Block(match["label"], match[0] + "\n", float(match["end"] or math.inf)) for match in matches)
    return _not_ended(found)


class Credential:
    """The credential in one place, which may be replaced at any time."""

    def __init__(self, path: Path, key: str = "the credential") -> None:
        """`key` is what errors call it."""
        self.path = path.absolute()
        self.key = key
        self.files = self._files()
        self._blocks: list[Block] = []
        self._known: Pem | None = None
        self._mark: tuple[int, ...] = ()
        self._ends_s = math.inf
        """The time at which the next certificate of it ends."""
        self._told_s = -_TELL_EVERY_S

    @classmethod
    def of_stack(cls, bind: BindConfig, directory: Path) -> Credential:
        """Return the credential of the stack whose files are in `directory`.

        Services, the command line, the SDK and tools all find it here: in the place that `bind.credential_file` names,
        else in the file that `flotilla up` made.
        """
        if bind.credential_file is not None:
            return cls(bind.credential_file, "bind.credential_file")
        return cls(directory / CREDENTIAL_FILE, "the stack's credential")

    def _files(self) -> tuple[Path, Path, Path]:
        """The files of certificate, key and authorities, which may be one."""
        if not os.path.isdir(self.path):
            return self.path, self.path, self.path
        certificate, key, authorities = (self.path / name for name in _FOLDER)
        return certificate, key, authorities

    def read(self) -> Pem:
        """Return what the file holds now; raise InvalidConfig or Unavailable for what no peer would take."""
        return _pem(self._read())

    def current(self) -> Pem:
        """Return what the file holds, the same object until that changes.

        A file that cannot be used, which is told once a minute, changes nothing.
        """
        mark = self._looked()
        known = self._known
        if known is not None and mark in ((), self._mark) and time.time() < self._ends_s:
            return known
        try:
            self._keep(self._read())
            self._mark = mark
        except (FlotillaError, OSError) as error:
            if known is None:
                raise
            # It is read again at the next call, because a shared disk may have been at fault.
            if time.monotonic() - self._told_s >= _TELL_EVERY_S:
                self._told_s = time.monotonic()
                logger.warning("the replaced credential is not used: %s", error)
            if time.time() >= self._ends_s:
                self._keep(_not_ended(self._blocks))
        assert self._known is not None
        return self._known

    def _keep(self, found: list[Block]) -> None:
        self._blocks, self._known = found, _pem(found)
        self._ends_s = min(block.ends_s for block in found)

    def require_service(self, where: str) -> None:
        """Raise InvalidConfig where no client would take this for the credential of a service of the stack.

        It is tried as clients will try it: by a handshake with ourselves.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.create_default_context(cadata=self.read().authorities.decode())
        server.load_cert_chain(*self.files[:2])
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
                "a credential with a role is for callers"
                if is_role
                else "no client would take this credential",
                where=f"{where}: {self.key} {self.path}",
                why="a service shows the credential of the stack itself" if is_role else error.verify_message,
                next_step="name the stack's own credential in bind.credential_file, or leave the key out; flotilla "
                "token rotate makes a new one",
            ) from None

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
        where = f"{self.key} {self.path}"
        certificate, key, authorities = self.files
        try:
            os.stat(certificate)
        except PermissionError:
            pass  # As its reader says.
        except OSError:
            raise self._missing() from None
        if certificate == key:
            found = blocks(read_secret(self.path, self.key))
        else:
            # One after the other they are what one file would be.
            try:
                text = "\n".join(
                    (certificate.read_text(), read_secret(key, self.key), authorities.read_text())
                )
            except (OSError, UnicodeError) as error:
                raise InvalidConfig("the credential cannot be read", where=where, why=str(error)) from None
            found = blocks(text)
        keys = [place for place, block in enumerate(found) if block.is_key]
        if len(keys) != 1 or not 0 < keys[0] < len(found) - 1:
            raise InvalidConfig(
                "the file is no credential",
                where=where,
                why="it has to hold a certificate, its private key and the certificate of an authority, in this order",
                next_step="have the owner of the stack make one (flotilla token create), or copy the stack's own",
            )
        try:
            # The empty password keeps OpenSSL from asking for one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise InvalidConfig(
                "the key does not belong to the certificate",
                where=where,
                why=str(error),
                next_step="copy the whole credential again",
            ) from None
        try:
            trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trusting.load_verify_locations(cadata=_pem(found).authorities.decode())
        except ssl.SSLError as error:
            raise InvalidConfig(
                "an authority of the credential cannot be read",
                where=where,
                why=str(error),
                next_step="copy the whole credential again",
            ) from None
        return found

    def _missing(self) -> FlotillaError:
        if self.key.startswith("the stack"):
            return Unavailable(
                "the stack has no credential",
                where=str(self.path),
                why="it has not been started here yet, or an older Flotilla started it",
                next_step="start it: flotilla up (where it runs already: flotilla down first). On another host: copy "
                "its credential.pem to this place, or name a copy in bind.credential_file",
            )
        return InvalidConfig("the credential is not there", where=f"{self.key} {self.path}")


def _pem(found: list[Block]) -> Pem:
    key = next(place for place, block in enumerate(found) if block.is_key)
    return Pem(*map(_bytes, (found[key : key + 1], found[:key], found[key + 1 :])))


def _not_ended(found: Iterable[Block]) -> list[Block]:
    return [block for block in found if time.time() < block.ends_s]


def _bytes(found: list[Block]) -> bytes:
    return "".join(block.text for block in found).encode()
