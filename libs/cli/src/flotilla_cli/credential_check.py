"""Checks the credential of a stack, for `flotilla doctor` and `flotilla config validate`."""

from __future__ import annotations

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_core.config import StackConfig
from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_core.findings import failed, passed, warned
from flotilla_core.trust import Credential
from flotilla_launch.paths import StackPaths

CHECK = "credential"
_ANOTHER_ONE = (
    "make another one: flotilla token rotate, then copy credential.pem to the other hosts; where bind.credential_file "
    "names what another program writes, have that one renew it. Nothing has to be restarted"
)


def credential_finding(config: StackConfig) -> Finding:
    """Return whether services can work with it, and for how long."""
    # Its package costs a fifth of a second, which other checks need not pay.
    from flotilla_core.trust import certificates

    credential = Credential.of_stack(config.bind, StackPaths.of(config.state_dir, config.name).directory)
    try:
        pem = credential.read()
        if problem := certificates.own_problem(pem):
            return failed(CHECK, f"{credential.path}: {problem}", _ANOTHER_ONE)
        credential.require_service("this stack")
    except Unavailable:
        return passed(CHECK, "none yet: flotilla up creates it")
    except FlotillaError as error:
        finding = error.finding()
        finding.code, finding.next_step = CHECK, error.next_step or _ANOTHER_ONE
        return finding
    one = certificates.own(pem)
    left = certificates.days_left(one)
    found = f"{credential.path}: {certificates.who(one)}, good for {left:,.0f} more days"
    return passed(CHECK, found) if left >= certificates.WARN_DAYS else warned(CHECK, found, _ANOTHER_ONE)
