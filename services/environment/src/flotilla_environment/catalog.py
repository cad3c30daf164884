"""The available environments, and the resolution of an `EnvironmentSpec` to the code of one.

Invariant: no code of a user is imported into the service: a worker loads it, and `problem` in the process of a plan.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.config.run import AGENT
from flotilla_core.errors import FlotillaError
from flotilla_core.structs import to_json
from flotilla_environment.agents.spec import DESCRIPTION, AgentSpec
from flotilla_environment.builtin import BUILTIN
from flotilla_environment.environment import Environment
from flotilla_environment.worker import load
from flotilla_workers.catalog import Catalog
from flotilla_workers.functions import Target
from flotilla_workers.worker import answer

CATALOG = Catalog("environment", "Class", "flotilla.environments", (*BUILTIN, AGENT))


def resolve(spec: pb.EnvironmentSpec, code: Path | None = None) -> Target:
    """Return the code of an environment; `code` is where the file of its class is on this host."""
    parameters = to_json(spec.parameters)
    if spec.environment in BUILTIN:
        return Target("builtin", spec.environment, parameters=parameters, trusted=spec.trusted)
    return CATALOG.target(spec.environment, parameters, code)._replace(trusted=spec.trusted)


def problem(environment: str, parameters: dict[str, Any]) -> str:
    """Return why an environment cannot be loaded, found out in this process; empty if it can."""
    spec = pb.EnvironmentSpec(environment=environment)
    spec.parameters.update(parameters)
    try:
        if environment == AGENT:
            agent = AgentSpec.of(parameters)
            if not agent.comes_by_itself:
                agent.started(trusted=False)
            return ""
        target = resolve(spec)
    except FlotillaError as error:
        return str(error)
    return str(
        answer({"do": "load", "key": target.key, "target": target._asdict()}, load, {}).get("failed", "")
    )


def list_environments() -> list[pb.EnvironmentInfo]:
    """Return what is built in, and entry points; classes in files need no registration."""
    found = [_info(name, environment) for name, environment in BUILTIN.items()]
    agent = pb.EnvironmentInfo(name=AGENT, description=DESCRIPTION)
    agent.parameters.update(asdict(AgentSpec()))
    found = sorted([*found, agent], key=lambda one: one.name)
    points = CATALOG.described_entry_points()
    return found + [pb.EnvironmentInfo(name=name, description=text) for name, text in points]


def _info(name: str, environment: type[Environment]) -> pb.EnvironmentInfo:
    info = pb.EnvironmentInfo(name=name, description=inspect.getdoc(environment) or "")
    parameters = inspect.signature(environment).parameters.values()
    info.parameters.update(
        {one.name: None if one.default is one.empty else one.default for one in parameters}
    )
    return info
