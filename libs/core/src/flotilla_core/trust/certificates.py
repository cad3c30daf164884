"""Certificates of a stack: its authority, one certificate a host, and what is wrong with one.

Invariants: a private key is written to a file that only its owner can read; a certificate names the hosts and addresses
by which its holder is dialled, loopback among them, and is good for both ends of a connection; an authority that is
there is used again, so certificates are renewed by the command that made them. Files that are replaced are used once
they are complete and good, and until then what was read before.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_core.addresses import canonical
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.files import write_atomically
from flotilla_core.trust.secret_file import read_secret, write_secret

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from flotilla_core.config.stack import TlsConfig

AUTHORITY_DAYS = 3650
DAYS = 365
WARN_DAYS = 14
CA_FILE = "ca.pem"
CERTIFICATE_FILE = "certificate.pem"
KEY_FILE = "key.pem"
_CA_KEY_FILE = "ca.key"
_TELL_EVERY_S = 60.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# The clock of another host may be behind.
_BEFORE = datetime.timedelta(hours=1)

logger = logging.getLogger(__name__)


def make_certificates(folder: Path, hosts: Sequence[str], days: float = DAYS) -> list[Path]:
    """Make one folder a host, with a certificate, its key and the authority's certificate; return the folders.

    The authority stays in `folder`, and is made where there is none yet.
    """
    authority, authority_key = _authority(folder)
    made = []
    for host in map(canonical, hosts):
        place = folder / host
        place.mkdir(mode=0o700, exist_ok=True)
        key = _new_key()
        names = _names([host, *_LOOPBACK])
        certificate = _signed(host, key, authority, authority_key, days, names)
        write_secret(place / KEY_FILE, _pem_of_key(key))
        write_atomically(place / CERTIFICATE_FILE, _pem(certificate))
        write_atomically(place / CA_FILE, _pem(authority))
        made.append(place)
    return made


def _authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / CA_FILE).exists():
        text = read_secret(folder / _CA_KEY_FILE, "the key of the authority")
        known = load_pem_private_key(text.encode(), None)
        assert isinstance(known, ec.EllipticCurvePrivateKey)
        return read_certificates(folder / CA_FILE)[0], known
    key = _new_key()
    certificate = _signed(
        f"Flotilla authority of {folder.absolute().name}", key, None, key, AUTHORITY_DAYS, None
    )
    write_secret(folder / _CA_KEY_FILE, _pem_of_key(key))
    write_atomically(folder / CA_FILE, _pem(certificate))
    return certificate, key


def _signed(
    name: str,
    key: EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
    authority_key: EllipticCurvePrivateKey,
    days: float,
    names: x509.SubjectAlternativeName | None,
) -> x509.Certificate:
    """Sign a certificate: of a host where it has names, else of an authority that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
    )
    if names is not None:
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    from cryptography import x509

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _new_key() -> EllipticCurvePrivateKey:
    # BoringSSL, which gRPC has, takes no Ed25519 in certificates.
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()


def _pem_of_key(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode().rstrip()


def read_certificates(path: Path, key: str = "the certificate file") -> list[x509.Certificate]:
    """Return the certificates of a PEM file, which has at least one."""
    return _parsed(path, key)[0]


def _parsed(path: Path, key: str) -> tuple[list[x509.Certificate], bytes]:
    """Return the certificates of a file, and what it holds: one reading, because it may be replaced at any time."""
    from cryptography import x509

    try:
        content = path.read_bytes()
        return x509.load_pem_x509_certificates(content), content
    except OSError as error:
        why = str(error.strerror)
    except ValueError as error:
        why = f"it is no PEM with a certificate ({error})"
    raise InvalidConfig(
        "a certificate cannot be read",
        where=f"{key} {path}",
        why=why,
        next_step="make certificates: flotilla certs init --hosts HOST,...",
    )


def who(certificate: x509.Certificate) -> str:
    """Name a certificate by its holder, its hosts and its issuer."""
    hosts = ", ".join(hosts_of(certificate)) or "no host"
    return (
        f"the certificate of {certificate.subject.rfc4514_string() or 'nobody'} (for {hosts}; "
        f"issued by {certificate.issuer.rfc4514_string() or 'nobody'})"
    )


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def is_for(certificate: x509.Certificate, host: str) -> bool:
    """Return whether a certificate is for a host, as TLS reads it: `*` stands for the first part of a name."""
    names = hosts_of(certificate)
    return host in names or f"*.{host.partition('.')[2]}" in names


def days_left(certificate: x509.Certificate) -> float:
    """Return how many days a certificate is good yet; a negative number for one that has expired."""
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left.total_seconds() / 86_400


def problem_of(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> str:
    """Return what is wrong with a certificate by our clock and our authorities; empty where nothing is."""
    from cryptography.exceptions import InvalidSignature

    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        return f"{who(certificate)} has expired: it was good until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return f"{who(certificate)} is good from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return ""
    names = " or ".join(authority.subject.rfc4514_string() for authority in authorities)
    return f"{who(certificate)} is foreign: our authority is {names}"


def unusable(problem: str, where: str) -> FlotillaError:
    """Return the error about a certificate of our own that cannot be used."""
    return InvalidConfig(
        problem,
        where=where,
        next_step="make another one (flotilla certs init --hosts HOST,... in the folder of the authority) and copy "
        "it to this place: running services take it by themselves",
    )


class TlsFiles:
    """The three files of one end."""

    def __init__(self, tls: TlsConfig) -> None:
        self.tls = tls
        self._mark = self._marks() or ()
        self._told_s = -_TELL_EVERY_S
        self._looked_s = -_TELL_EVERY_S

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return key, certificates and authorities; raise InvalidConfig for what no peer would take."""
        self._mark = self._marks() or ()
        return self._usable()

    def read_again(self) -> tuple[bytes, bytes, bytes] | None:
        """Return the files where they changed since they were read or first looked at, and can be used.

        What cannot be used is told once a minute.
        """
        marks = self._marks()
        if marks is None or marks == self._mark:
            self._tell_of_expiry()
            return None
        self._mark = marks
        try:
            return self._usable()
        except (FlotillaError, OSError) as error:
            self._tell("the replaced certificate is not used", str(error))
            return None

    def _marks(self) -> tuple[Any, ...] | None:
        """Return by what a replacement is noticed; None while the files are being replaced."""
        try:
            return tuple(_mark(path) for path in self._paths())
        except OSError:
            return None

    def _usable(self) -> tuple[bytes, bytes, bytes]:
        key = read_secret(self.tls.key_file, "bind.tls.key_file").encode()
        ours, chain = _parsed(self.tls.certificate_file, "bind.tls.certificate_file")
        authorities, trusted = _parsed(self.tls.ca_file, "bind.tls.ca_file")
        # Where intermediate ones follow, their chain is the peer's business.
        problem = problem_of(ours[0], [*ours[1:], *authorities])
        if problem:
            raise unusable(problem, f"bind.tls.certificate_file {self.tls.certificate_file}")
        if not _fit(ours[0], key):
            raise InvalidConfig(
                "the key does not belong to the certificate",
                where=f"bind.tls.key_file {self.tls.key_file}",
                next_step="name files of one folder that flotilla certs init made",
            )
        return key, chain, trusted

    def _tell_of_expiry(self) -> None:
        if time.monotonic() - self._looked_s < _TELL_EVERY_S:
            return
        self._looked_s = time.monotonic()
        try:
            self._usable()
        except (FlotillaError, OSError) as error:
            self._tell("the certificate is not good any more", str(error))

    def _tell(self, event: str, why: str) -> None:
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            logger.warning("%s: %s", event, why)

    def _paths(self) -> tuple[Path, ...]:
        return self.tls.key_file, self.tls.certificate_file, self.tls.ca_file


def _mark(path: Path) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _fit(certificate: Any, key: bytes) -> bool:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return bool(load_pem_private_key(key, None).public_key() == certificate.public_key())
    except (ValueError, TypeError):
        return False
