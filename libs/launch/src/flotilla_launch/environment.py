"""The variables of a service: text, or the place of a secret, which is read where the process starts.

Invariants: the value of a secret is in no table, message or file of ours, only in the environment of the process that
needs it; it is read at each start, so a new value needs no new stack. `shown` decides what of a variable anybody sees.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flotilla_core.config import ConfigModel, SecretReference
from flotilla_core.errors import FailedPrecondition
from flotilla_core.trust import read_secret

Variables = Mapping[str, str | SecretReference]

Model = TypeVar("Model", bound=ConfigModel)

_COMMAND_LIMIT_S = 30.0
_SECRETS = re.compile(
    r"(^|_)AUTH(_|$)|(CREDENTIALS?|KEYS?|PASS|PASSWORD|PASSWD|PWD|SECRETS?|TOKENS?)(_|$)", re.IGNORECASE
)
_LOGIN_IN_URL = re.compile(r"://[^/\s]*@")


def resolved(variables: Variables, service: str) -> dict[str, str]:
    """Return the variables as the process gets them; raise FailedPrecondition where a secret cannot be read."""
    return {
        name: value if isinstance(value, str) else _secret(value, f"variable {name} of {service}")
        for name, value in variables.items()
    }


def shown(name: str, value: object) -> str:
    """Return what may be seen of a variable: never a secret, nor what by its name or form looks like one."""
    if isinstance(value, SecretReference):
        return f"(from {_place(value)})"
    text = str(value)
    return "(hidden)" if _SECRETS.search(name) or _LOGIN_IN_URL.search(text) else text


def presentable(config: Model) -> Model:
    """Return the configuration as it may be printed: without texts of variables that look like secrets."""

    def seen(name: str, value: Any) -> Any:
        if name == "environment" and isinstance(value, dict):
            return {key: shown(key, one) if isinstance(one, str) else one for key, one in value.items()}
        if isinstance(value, dict):
            return {key: seen("", one) for key, one in value.items()}
        return presentable(value) if isinstance(value, ConfigModel) else value

    return config.model_copy(
        update={name: seen(name, value) for name, value in config if value != seen(name, value)}
    )


def _place(reference: SecretReference) -> str:
    if reference.file is not None:
        return f"file {reference.file}"
    if reference.environment is not None:
        return f"variable {reference.environment}"
    assert reference.command is not None
    return f"command {Path(reference.command[0]).name}"  # its arguments may be secrets


def _secret(reference: SecretReference, where: str) -> str:
    if reference.file is not None:
        return read_secret(reference.file, where).rstrip("\r\n")
    if reference.environment is not None:
        value = os.environ.get(reference.environment)
        if value is None:
            raise FailedPrecondition(
                "a secret is not there",
                where=where,
                why=f"the process that starts the service has no variable {reference.environment}",
                next_step="export it before flotilla up, or name a file instead",
            )
        return value
    assert reference.command is not None
    return _printed(list(reference.command), where)


def _printed(command: list[str], where: str) -> str:
    """Return what the command prints; an error says nothing of its output, which may hold the secret."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_LIMIT_S, check=True
        )
        text = done.stdout.decode().rstrip("\r\n")
    except subprocess.CalledProcessError as error:
        why = f"it ended with status {error.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it took longer than {_COMMAND_LIMIT_S:.0f} s"
    except OSError as error:
        why = str(error.strerror)
    except UnicodeDecodeError:
        why = "what it printed is not text"
    else:
        if text and "\0" not in text:
            return text
        why = "it printed nothing" if not text else "it printed a NUL"
    raise FailedPrecondition(
        "the command of a secret failed",
        where=f"{where}, command {Path(command[0]).name}",
        why=why,
        next_step="run it by hand as the user who starts the stack, on the node of the service",
    )
