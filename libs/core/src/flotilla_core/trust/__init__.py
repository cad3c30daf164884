"""The trust within a stack: its secret, and the proofs that are made with it.

Invariants: the secret itself never leaves a process of the stack; what travels is a signature that is good for one
call to one address, or for one registration; nothing here imports gRPC or NATS.
"""

from __future__ import annotations

from flotilla_core.trust.calls import HEADER, CallSigner, CallVerifier, dialled
from flotilla_core.trust.registrations import RegistrationSigner, RegistrationVerifier
from flotilla_core.trust.secret_file import make_token, read_secret, read_token

__all__ = [
    "HEADER",
    "CallSigner",
    "CallVerifier",
    "RegistrationSigner",
    "RegistrationVerifier",
    "dialled",
    "make_token",
    "read_secret",
    "read_token",
]
