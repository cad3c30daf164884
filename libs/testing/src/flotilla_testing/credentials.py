"""Credentials for tests: of one stack, of holders with a role, and those that nobody should take.

Invariant: the authority of all stacks of a process is one and made once, because keys cost time.
"""

from __future__ import annotations

import atexit
import datetime
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

from flotilla_core.config import BindConfig
from flotilla_core.files import make_private_folder
from flotilla_core.rpc.interface import hand_down
from flotilla_core.trust import Claims, Credential, write_secret
from flotilla_core.trust.authority import AUTHORITY_FILE, create_credential, make_credential
from flotilla_core.trust.certificates import Authority, text_of

A_MOMENT_S = 1.0


@cache
def _authority() -> str:
    return str(Authority.new("tests"))


def credential(directory: Path) -> Credential:
    """Return the credential of the stack in `directory`, which has one then."""
    make_private_folder(directory)
    if not (directory / AUTHORITY_FILE).exists():
        write_secret(directory / AUTHORITY_FILE, _authority())
    return make_credential(BindConfig(), directory)


@cache
def ours() -> Credential:
    """Return the credential of a stack that all tests of a process share."""
    folder = Path(tempfile.mkdtemp(prefix="flotilla-credential-"))
    atexit.register(shutil.rmtree, folder)
    return credential(folder)


def hand_ours_down() -> None:
    """Let weight groups of this process, and of those that it starts, show this credential."""
    hand_down(BindConfig(), ours())


def role_credential(directory: Path, role: str, name: str = "ana", ends_s: int | None = None) -> Credential:
    """Return the credential of a holder with a role in the stack in `directory`."""
    credential(directory)
    path = directory / f"{role}-{name}.pem"
    write_secret(path, create_credential(directory, Claims(role, name, ends_s)))
    return Credential(path)


def stranger(directory: Path) -> Credential:
    """Return a credential of another stack."""
    folder = directory / "stranger"
    make_private_folder(folder)
    return make_credential(BindConfig(), folder)


def expired(directory: Path, in_s: float = -A_MOMENT_S) -> Credential:
    """Return a credential of the stack in `directory` itself that ended a moment ago, or ends in some seconds."""
    credential(directory)
    authority = Authority.of((directory / AUTHORITY_FILE).read_text())
    end = datetime.datetime.fromtimestamp(time.time() + in_s, datetime.UTC)
    path = directory / f"ends-{in_s:.0f}.pem"
    write_secret(path, "".join((*authority.issue(None, end), text_of(authority.certificate))))
    return Credential(path)
