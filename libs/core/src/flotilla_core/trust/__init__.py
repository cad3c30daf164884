"""The trust within a stack: its secret, the tokens that are derived from it, and the proofs that are made with them.

Invariants: our clients never send the secret itself; what travels is a signature that is good for one
call to one address, or for one registration; nothing here imports gRPC or NATS.
"""

from __future__ import annotations

from flotilla_core.trust.calls import HEADER, CallSigner, CallVerifier
from flotilla_core.trust.registrations import RegistrationSigner, RegistrationVerifier
from flotilla_core.trust.role_tokens import Claims, make_role_token
from flotilla_core.trust.secret_file import (
    Token,
    TokenFile,
    check_is_secret,
    make_token,
    read_secret,
    read_token,
    rotate_token,
    write_secret,
)
