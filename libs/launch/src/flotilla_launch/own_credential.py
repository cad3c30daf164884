"""The credential of a stack, made where the stack has none, before anything of it starts."""

from __future__ import annotations

from collections.abc import Callable

from flotilla_core.config import StackConfig
from flotilla_core.trust import Credential
from flotilla_core.trust.authority import make_credential
from flotilla_launch.paths import StackPaths

_OLDER_FILE = "token"
"""The file by which the services of an older release knew each other."""


def own_credential(stack: StackConfig, paths: StackPaths, say: Callable[[str], None]) -> Credential:
    """Return the credential by which the services of a stack know each other; a new stack gets one."""
    older = paths.directory / _OLDER_FILE
    replaces = older.exists() and not paths.credential_file.exists() and stack.bind.credential_file is None
    credential = make_credential(stack.bind, paths.directory)
    credential.require_service(f"stack {stack.name!r}")
    if replaces:
        say(
            f"{older}: it and tokens made with it are of no use any more: the stack has {credential.path} now, and "
            "flotilla token create makes credentials for others"
        )
    return credential
