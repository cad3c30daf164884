"""The trust within a stack: its authority, the credentials that it signs, and what their holders may do.

Invariants: whoever belongs to a stack holds a certificate of its authority, and shows it at each connection; what a
certificate is good for stands in the certificate alone; nothing here imports gRPC or NATS, and `cryptography` is
imported only where a certificate is made or explained.
"""

from __future__ import annotations

from flotilla_core.trust.credential import Credential, Pem
from flotilla_core.trust.private_files import read_secret, write_secret
from flotilla_core.trust.roles import Claims

__all__ = ["Claims", "Credential", "Pem", "read_secret", "write_secret"]
