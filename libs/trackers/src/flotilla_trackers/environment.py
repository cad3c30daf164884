"""Finds what a tracker needs before it begins: its client, the file of its secrets, and its proxy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from flotilla_core.config import DIRECT, HostedTrackerConfig, RunConfig, TrackerConfig
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.trust import read_secret

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
CLIENTS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The package that each tracker imports."""


def tracker_errors(config: RunConfig) -> list[str]:
    """Find trackers that could not begin: without their client, or with a file of secrets that cannot be used."""
    errors = []
    for section in config.trackers:
        spec = importlib.util.find_spec(CLIENTS[section.type])
        # A folder of that name in the working directory is no package: some clients make one.
        if spec is None or spec.origin is None:
            errors.append(
                f"trackers names {section.type}, whose client is not installed where the coordinator runs: "
                f"pip install 'flotilla-trackers[{section.type}]'"
            )
        if isinstance(section, HostedTrackerConfig):
            try:
                secrets_of(section)
            except FlotillaError as error:
                errors.append(str(error))
    return errors


def secrets_of(config: HostedTrackerConfig) -> dict[str, str]:
    """Return the variables of the file of secrets; raise where it is not as it should be."""
    if config.secrets_file is None:
        return {}
    found = {}
    for number, line in enumerate(read_secret(config.secrets_file, "secrets_file").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise InvalidConfig(
                "a line of secrets is not NAME=value",
                where=f"secrets_file {config.secrets_file}, line {number}",
                next_step="write one variable a line, such as WANDB_API_KEY=...",
            )
        found[name.strip()] = value.strip()
    return found


def environment_of(config: TrackerConfig, own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a tracker's process, and the names of the variables from its file."""
    if not isinstance(config, HostedTrackerConfig):
        return dict(own), []
    secrets = secrets_of(config)
    return _with_proxy(config, own) | secrets, list(secrets)


def _with_proxy(config: HostedTrackerConfig, own: Mapping[str, str]) -> dict[str, str]:
    if config.proxy is None:
        return dict(own)
    environment = {name: value for name, value in own.items() if name.lower() not in PROXIES}
    if config.proxy != DIRECT:
        for name in PROXIES[:2]:
            environment[name] = environment[name.upper()] = config.proxy
    return environment
