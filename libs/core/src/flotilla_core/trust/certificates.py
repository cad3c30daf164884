"""Certificates: how they are made, and what is wrong with one.

Invariants: an authority signs its own certificate, those of holders, and that of the authority which takes its place;
a holder with a role gets no certificate by which it could pose as a service. Whoever imports this pays for
`cryptography`, so it is imported where a certificate is made or explained, and nowhere else.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flotilla_core.trust.credential import Pem
from flotilla_core.trust.roles import PREFIX, SERVER_NAME, Claims, clock

DAYS = 3650
WARN_DAYS = 14
# The clock of another host may be behind.
_BEFORE = datetime.timedelta(hours=1)


class Authority(NamedTuple):
    """An authority that can sign."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def new(cls, stack: str) -> Authority:
        """Make the authority of a stack."""
        # BoringSSL, which gRPC has, takes no Ed25519 in certificates. Authorities of one stack have different names,
        # so that an error says which one is meant.
        key = generate_private_key(SECP256R1())
        name = _named(f"Flotilla {stack[:40]} {secrets.token_hex(3)}")
        return cls(_signed(_builder(name, name, key.public_key(), _in_days(DAYS), signs=True), key), key)

    @classmethod
    def of(cls, text: str) -> Authority:
        """Read an authority."""
        key = load_pem_private_key(text.encode(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        return cls(x509.load_pem_x509_certificate(text.encode()), key)

    def __str__(self) -> str:
        return text_of(self.certificate) + _text_of_key(self.key)

    def issue(self, claims: Claims | None, ends: datetime.datetime | None = None) -> tuple[str, str]:
        """Return a certificate and its key, for a holder of these claims, or for the stack itself where there are none.

        It is good as long as the authority, or until the claims or `ends` say.
        """
        if claims is not None and claims.ends_s is not None:
            ends = datetime.datetime.fromtimestamp(claims.ends_s, datetime.UTC)
        ends = min(ends or self.certificate.not_valid_after_utc, self.certificate.not_valid_after_utc)
        key = generate_private_key(SECP256R1())
        subject = _named("service" if claims is None else f"{claims.role} {claims.name}")
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{PREFIX}{claims}")]
        if claims is None:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names = [x509.DNSName(SERVER_NAME)]
        builder = (
            _builder(subject, self.certificate.subject, key.public_key(), ends, signs=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        return text_of(_signed(builder, self.key)), _text_of_key(key)

    def vouch_for(self, successor: Authority) -> str:
        """Return the certificate by which those who trust this authority alone trust its successor."""
        known = successor.certificate
        builder = _builder(
            known.subject,
            self.certificate.subject,
            successor.key.public_key(),
            self.certificate.not_valid_after_utc,
            signs=True,
        )
        return text_of(_signed(builder, self.key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePublicKey,
    ends: datetime.datetime,
    *,
    signs: bool,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(_in_days(0), ends) - _BEFORE)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, by: EllipticCurvePrivateKey) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    return builder.add_extension(issuer, critical=False).sign(by, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _in_days(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def text_of(certificate: x509.Certificate) -> str:
    """Return a certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM).decode()


def _text_of_key(key: EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def own(credential: Pem) -> x509.Certificate:
    """Return the certificate of the holder of a credential."""
    return x509.load_pem_x509_certificate(credential.chain)


def own_problem(credential: Pem) -> str:
    """Return what is wrong with our certificate, as we can see ourselves; empty where nothing is."""
    ours, *chain = x509.load_pem_x509_certificates(credential.chain)
    return problem_of(ours, [*chain, *x509.load_pem_x509_certificates(credential.authorities)])


def days_left(certificate: x509.Certificate) -> float:
    """Return how many days a certificate is good yet; a negative number for one that has expired."""
    return (certificate.not_valid_after_utc - _in_days(0)).total_seconds() / 86_400


def who(certificate: x509.Certificate) -> str:
    """Name a certificate by its holder, its names and its issuer."""
    return (
        f"the certificate of {certificate.subject.rfc4514_string() or 'nobody'} "
        f"(for {', '.join(names_of(certificate)) or 'nothing'}; "
        f"issued by {certificate.issuer.rfc4514_string() or 'nobody'})"
    )


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the names that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def problem_of(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> str:
    """Return what is wrong with a certificate by our clock and our authorities; empty where nothing is."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends < _in_days(0):
        return f"{who(certificate)} has expired: it was good until {clock(ends.timestamp())}"
    if begins > _in_days(0):
        return f"{who(certificate)} is good from {clock(begins.timestamp())} on"
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return ""
    trusted = " or ".join(authority.subject.rfc4514_string() for authority in authorities)
    return f"{who(certificate)} is foreign: we trust {trusted}"


def problem_of_service(shown: bytes, credential: Pem) -> str:
    """Return what is wrong with a certificate that a service shows (DER); empty where nothing is."""
    certificate = x509.load_der_x509_certificate(shown)
    problem = problem_of(certificate, x509.load_pem_x509_certificates(credential.authorities))
    if problem or SERVER_NAME in names_of(certificate):
        return problem
    if any(name.startswith(PREFIX) for name in names_of(certificate)):
        return f"{who(certificate)} is that of a holder with a role, who is no service"
    return f"{who(certificate)} is not for {SERVER_NAME}"
