"""The authority of a stack: it makes every credential, and another one takes its place when it is replaced.

Invariants: the authority stays where the stack was made, and is never part of a credential; of two processes that make
one the first wins. In the overlap of a replacement the successor is trusted by those who trust the authority before it,
and the other way round: so copies of the old credential go on with the new one, and all of them end with the overlap.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.trust.credential import CREDENTIAL_FILE, UNTIL, Credential, blocks
from flotilla_core.trust.private_files import read_secret, write_secret, write_secret_once
from flotilla_core.trust.roles import Claims

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig
    from flotilla_core.trust.certificates import Authority

AUTHORITY_FILE = "authority.pem"
OVERLAP_S = 600.0


def make_credential(bind: BindConfig, directory: Path) -> Credential:
    """Return the credential of the stack; make it, and the authority, where the stack has none yet."""
    credential = Credential.of_stack(bind, directory)
    if bind.credential_file is None and not credential.path.exists():
        from flotilla_core.trust.certificates import Authority

        if not (directory / AUTHORITY_FILE).exists():
            write_secret_once(directory / AUTHORITY_FILE, str(Authority.new(directory.name)))
        write_secret_once(credential.path, create_credential(directory, None))
    credential.read()
    return credential


def create_credential(directory: Path, claims: Claims | None) -> str:
    """Return the credential of a holder of these claims, or another one of the stack itself where there are none."""
    if claims is not None and Claims.parse(str(claims)) != claims:
        raise InvalidRequest(
            f"{claims.name[:80]!r} is no name of a holder",
            next_step="give 1 to 64 letters, digits and . _ @ - (for example ana or ci@example)",
        )
    from flotilla_core.trust.certificates import text_of

    with _alone(directory):
        authority = _authority(directory)
        vouched, own = "", text_of(authority.certificate)
        trusted = own
        if (directory / CREDENTIAL_FILE).exists():
            # As long as the stack is in an overlap, its credential says what all trust.
            authorities, _, chain = Credential(directory / CREDENTIAL_FILE, "the stack's credential").read()
            vouched = "".join(block.text for block in blocks(chain.decode())[1:])
            trusted = authorities.decode()
            if own.strip() not in trusted:
                raise FailedPrecondition(
                    "the stack does not trust the authority that is here",
                    where=str(directory / AUTHORITY_FILE),
                    why="its replacement was cut short",
                    next_step="repeat it: flotilla token rotate",
                )
        return _text(authority, claims, vouched, trusted)


def rotate(directory: Path, overlap_s: float = OVERLAP_S) -> Path:
    """Replace the authority of a stack and its credential, and return the file of that; whoever uses it learns of it.

    For `overlap_s` the authority before it is trusted; one before that ends at once.
    """
    from flotilla_core.trust.certificates import Authority, text_of

    with _alone(directory):
        old, new = _authority(directory), Authority.new(directory.name)
        vouched, trusted = "", text_of(new.certificate)
        if overlap_s > 0:
            until = f"{UNTIL}{time.time() + overlap_s:.0f}\n"
            vouched = f"{until}{old.vouch_for(new)}"
            trusted += f"{until}{text_of(old.certificate)}"
        path = directory / CREDENTIAL_FILE
        # Where the second file is not written, all of this can be repeated.
        write_secret(path, _text(new, None, vouched, trusted))
        write_secret(directory / AUTHORITY_FILE, str(new))
        return path


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Wait until no other process reads or replaces the authority."""
    _authority(directory)  # Where there is none, its folder may be missing too.
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _authority(directory: Path) -> Authority:
    from flotilla_core.trust.certificates import Authority

    path = directory / AUTHORITY_FILE
    if not path.exists():
        raise FailedPrecondition(
            "the authority of the stack is not here",
            where=str(path),
            why="it stays on the host where the stack was made; where bind.credential_file names what another program "
            "writes, that program has it",
            next_step="run the command there, or start the stack once (flotilla up)",
        )
    return Authority.of(read_secret(path, "the stack's authority"))


def _text(authority: Authority, claims: Claims | None, vouched: str, trusted: str) -> str:
    """Return the text of a new credential: certificates that vouch for its issuer follow the holder's own."""
    certificate, key = authority.issue(claims)
    holder = "service" if claims is None else f"role {claims.role}, {claims.name}"
    return f"# Flotilla credential: {holder}\n{certificate}{vouched}{key}{trusted}"
