"""The values of the chart for a stack: the stack file below `stack`, and what the user's own files of values say.

Invariants: pure functions of these files and of words that are made once; the stack file alone says what is below
`stack`, so a default of the chart never changes a stack; what pods cannot have is refused by the name of its key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.config import StackConfig, read_values
from flotilla_core.config.model import Environment
from flotilla_core.errors import InvalidConfig
from flotilla_core.gangs import gang_of, model_of, named_gangs, roles_of
from flotilla_core.judge_generators import judge_roles
from flotilla_core.kinds import KINDS
from flotilla_core.roles import NAMED, section_of
from flotilla_launch.cluster import check_several_hosts
from flotilla_launch.placement import refuse

CHART = Path(__file__).parent / "chart"
PORT = 7070
"""The port of every service, where the stack file names none: each pod has an address of its own."""
_MODELS = "/models/"
"""The folder of pods that has `model.volume`."""
_NOT_IN_PODS = {"state_dir", "placement", "launcher", "compose", "slurm", "ray", "kubernetes"}
_COMPONENTS = tuple(kind.section for kind in KINDS if kind.section)
_LONGEST_NAME = 40

Values = dict[str, Any]


@dataclass(frozen=True)
class Words:
    """The secrets of a stack whose values name no Secret."""

    credential: str = field(repr=False)
    nats: str = field(repr=False)
    nats_coordinator: str = field(repr=False)
    routes: str = field(repr=False)


def check(stack: StackConfig) -> None:
    """Raise InvalidConfig for a stack that cannot run in pods."""
    check_several_hosts(in_pods(stack), "Kubernetes")
    refused = (
        *(
            (
                len(gang_of(stack, role).hosts) > 1,
                f"{section_of(role)}.hosts: the chart has all ranks of a gang in one pod",
                "leave hosts out",
            )
            for role in roles_of(stack)
        ),
        *(
            (
                True,
                f"{section_of(role)}.model: the chart starts no generators of judges",
                "serve the model yourself, and name its url",
            )
            for role in judge_roles(stack)
        ),
        (
            stack.bind.credential_file is not None,
            "bind.credential_file: it is a file of this host",
            "name a Secret in tls.existingSecret, in a file of kubernetes.values",
        ),
    )
    refuse("this stack cannot run on Kubernetes", refused)
    for role in roles_of(stack):
        _check_model(model_of(stack, role), "model" if role == "policy" else f"{section_of(role)}.model")
    for section, variables in _environments(stack):
        for name, value in variables.items():
            if not isinstance(value, str):
                raise InvalidConfig(
                    "no pod can read this secret",
                    where=f"{section}.environment.{name}",
                    why="its place is one of this host",
                    next_step=f"put it into a Secret of the namespace, and name that in {_component(section)}.env of a "
                    "file of kubernetes.values (valueFrom.secretKeyRef)",
                )


def in_pods(stack: StackConfig) -> StackConfig:
    """Return the stack as its pods read it: each listens on every address that it has, at a port that is known."""
    bind = stack.bind.model_copy(
        update={"host": "0.0.0.0", "port": stack.bind.port or PORT, "advertise_host": None}
    )
    return stack.model_copy(update={"bind": bind})


def given_values(stack: StackConfig) -> Values:
    """Return what the user's files say together, later ones on top; raise InvalidConfig where one is none."""
    given: Values = {}
    for file in stack.kubernetes.values:
        try:
            found = read_values(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(
                "a file of values cannot be read",
                where=f"kubernetes.values {file}",
                why=getattr(error, "strerror", None) or "it is not UTF-8 text",
            ) from None
        if "stack" in found:
            raise InvalidConfig(
                "a file of values describes a stack",
                where=f"{file}: stack",
                why="the stack file of flotilla up is the stack",
                next_step="move these keys to the stack file",
            )
        given = merged(given, found)
    return given


def values_of(stack: StackConfig, given: Values, words: Words | None) -> Values:
    """Return the values with which Helm installs the stack; without words (for a plan) they hold no secret."""
    values = copy.deepcopy(given)
    defaults = chart_values()
    values["stack"] = _without_nulls(_stack_values(in_pods(stack)), defaults["stack"])
    if "auth" not in given:
        values["auth"] = {"existingSecret": ""}
        if words is not None:
            values["auth"] |= {
                "credential": words.credential,
                "natsPassword": words.nats,
                "natsCoordinatorPassword": words.nats_coordinator,
                "natsRoutePassword": words.routes,
            }
    for component, variables in _variables(stack).items():
        own = values.setdefault(component, {})
        own["env"] = [*own.get("env", ()), *({"name": key, "value": text} for key, text in variables.items())]
    if stack.nats.url is not None and merged(defaults, values)["nats"]["enabled"]:
        raise InvalidConfig(
            "the stack would have two servers of NATS",
            where=f"nats.url {stack.nats.url}",
            why="the chart starts one of its own",
            next_step="leave nats.url out, or write `nats: {enabled: false}` in a file of kubernetes.values",
        )
    return values


def chart_values() -> Values:
    """Return the defaults of the chart."""
    loaded: Values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return loaded


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Return the values as Helm merges them: mappings by key, all else as it stands above; a null is no value."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def full_name(release: str) -> str:
    """Return what the names of all objects of a release begin with."""
    name = release if "flotilla" in release else f"{release}-flotilla"
    return name[:_LONGEST_NAME].removesuffix("-")


def _stack_values(stack: StackConfig) -> Values:
    """Return the keys of the stack file that pods read; what follows from the release is left to the chart."""
    values: Values = stack.model_dump(mode="json", exclude=_NOT_IN_PODS)
    values["coordinator"].pop("keep_runs")  # Kubernetes moves coordinators: the chart sets it.
    if stack.nats.url is None:
        del values["nats"]
    for section in (*_COMPONENTS, "critic", "reference", "teacher"):
        del values[section]["environment"]
    for kind in named_gangs(stack):
        for gang in values[NAMED[kind]].values():
            del gang["environment"]
    return values


def _without_nulls(values: Values, defaults: Any) -> Values:
    """Drop keys without a value, except those that shall take a default of the chart away."""
    kept: Values = {}
    for key, value in values.items():
        below = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            kept[key] = _without_nulls(value, below)
        elif value is not None or below is not None:
            kept[key] = value
    return kept


def _check_model(model: Path | str, where: str) -> None:
    text = str(model)
    if Path(text).is_absolute() and not text.startswith(_MODELS):
        raise InvalidConfig(
            "no pod has this folder",
            where=f"{where} {text}",
            why="it is one of this host",
            next_step="give the hub name of the model or its object storage, or put it on a volume (model.volume in a "
            "file of kubernetes.values), which pods have at /models",
        )


def _environments(stack: StackConfig) -> Iterator[tuple[str, Environment]]:
    """Give the variables of each section of the stack file whose services there are."""
    for role in roles_of(stack):
        if gang_of(stack, role).replicas:
            yield section_of(role), gang_of(stack, role).environment
    for kind in KINDS:
        if kind.section and not kind.is_gang:
            yield kind.section, getattr(stack, kind.section).environment


def _variables(stack: StackConfig) -> dict[str, Environment]:
    """Return the variables of each component that has any; all gangs are one component."""
    found: dict[str, Environment] = {}
    for section, variables in _environments(stack):
        if found.setdefault(_component(section), variables) != variables:
            raise InvalidConfig(
                "gangs have one environment on Kubernetes",
                where=f"{section}.environment",
                why="the chart gives the variables of `trainer` to all gangs",
                next_step="give each gang of the stack file the same environment",
            )
    return {component: variables for component, variables in found.items() if variables}


def _component(section: str) -> str:
    """Return the section of the chart's values that a section of the stack file belongs to."""
    return section if section in _COMPONENTS else "trainer"
