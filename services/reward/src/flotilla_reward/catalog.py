"""The available rewards, and the resolution of a `RewardSpec` to one of them.

Invariants: everything that can be wrong with a spec is found before any sample is scored. User code is never
imported into the service: a worker loads it, and `problem` in the process of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import struct_pb2
from pydantic import ValidationError

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config.rewards import judge_of
from flotilla_core.errors import FlotillaError, InvalidConfig, InvalidRequest
from flotilla_core.structs import to_json
from flotilla_reward.builtin import BuiltinReward
from flotilla_reward.table import BUILTIN
from flotilla_reward.worker import IN_JAIL, is_ours, load
from flotilla_workers.catalog import Catalog, did_you_mean
from flotilla_workers.functions import Target
from flotilla_workers.worker import answer

if TYPE_CHECKING:
    from flotilla_reward.judges.judge import Judge, Judges

CATALOG = Catalog("reward", "function", "flotilla.rewards", BUILTIN)
DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Term:
    """One term of a reward, ready to score. Exactly one of `builtin`, `target` and `judge` is set."""

    name: str
    timeout_s: float
    builtin: BuiltinReward | None
    """Runs in this process."""
    target: Target | None
    """Runs in a worker."""
    blames_response: bool = False
    """A response that takes until the limit, or ends the worker, is unverifiable."""
    version: str = ""
    """The version of a built-in reward or a judge; a function's is told by its worker."""
    runs_code: bool = False
    """Code of responses runs in the jail of its pool, in processes beside its worker."""
    judge: Judge | None = None
    """Asks a language model."""
    drops_unverifiable: bool = False
    """A response that it cannot verify is left out, and others are not compared with it."""

    @property
    def is_builtin(self) -> bool:
        """Return whether it is code of this service."""
        return self.target is None or is_ours(self.target)

    @property
    def needs_jail(self) -> bool:
        """Return whether code runs for it that nobody vouches for."""
        return self.runs_code or (
            self.target is not None and self.target.kind != "builtin" and not self.target.trusted
        )


def resolve(spec: pb.RewardSpec, code: Path | None = None, judges: Judges | None = None) -> Term:
    """Return the term behind a spec; `code` is where the file of its function is on this host."""
    return replace(_resolved(spec, code, judges), drops_unverifiable=spec.drops_unverifiable)


def _resolved(spec: pb.RewardSpec, code: Path | None, judges: Judges | None) -> Term:
    name, timeout_s = spec.name or spec.reward, DEFAULT_TIMEOUT_S
    if spec.HasField("timeout"):
        timeout_s = spec.timeout.seconds + spec.timeout.nanos / 1e9
    if timeout_s <= 0:
        raise InvalidRequest(f"timeout of reward {name} is {timeout_s:g} s: it must be above 0")
    parameters = to_json(spec.parameters)
    if judge_of(spec.reward):
        # The process of a plan, which asks no judge, starts faster without what connects to one.
        from flotilla_reward.judges.judge import Judges

        judge = (judges or Judges({})).resolve(spec.reward, parameters, spec.judge)
        return Term(name, timeout_s, None, None, version=judge.version, judge=judge)
    if spec.reward in BUILTIN:
        builtin = _builtin(spec.reward, parameters)
        builtin.require()
        version = _version_of(spec.reward)
        if builtin.bounded:
            return Term(name, timeout_s, builtin, None, version=version)
        target = Target("builtin", spec.reward, parameters=parameters)
        if builtin.jailed:
            target = Target("entry_point", IN_JAIL, spec.reward, parameters)
        return Term(name, timeout_s, None, target, builtin.blames_response, version, builtin.runs_code)
    target = CATALOG.target(spec.reward, parameters, code)._replace(trusted=spec.trusted)
    return Term(name, timeout_s, None, target, spec.blames_response)


def problem(reward: str, parameters: dict[str, Any]) -> str:
    """Return why a reward cannot be loaded with these parameters, found out in this process; empty if it can."""
    spec = pb.RewardSpec(reward=reward)
    spec.parameters.update(parameters)
    try:
        target = resolve(spec).target
    except FlotillaError as error:
        return str(error)
    if target is None:
        return ""
    return str(
        answer({"do": "load", "key": target.key, "target": target._asdict()}, load, {}).get("failed", "")
    )


def list_rewards() -> list[pb.RewardInfo]:
    """Built-ins and entry points; functions in files need no registration."""
    found = []
    for name, reward in BUILTIN.items():
        schema = struct_pb2.Struct()
        schema.update(_schema_of(name))
        found.append(pb.RewardInfo(name=name, description=(reward.__doc__ or "").strip(), parameters=schema))
    points = CATALOG.described_entry_points()
    return found + [pb.RewardInfo(name=name, description=text) for name, text in points]


@lru_cache
def _schema_of(builtin: str) -> dict[str, Any]:
    return BUILTIN[builtin].model_json_schema()


def _builtin(name: str, parameters: dict[str, Any]) -> BuiltinReward:
    try:
        return BUILTIN[name](**parameters)
    except ValidationError as error:
        known = list(BUILTIN[name].model_fields)
        problems = [_problem(item["loc"], item["type"], item["msg"], known) for item in error.errors()]
        raise InvalidConfig(
            f"parameters of reward {name} are wrong",
            why="; ".join(problems),
            next_step=f"It takes {', '.join(known)}.",
        ) from error


def _problem(location: tuple[int | str, ...], kind: str, message: str, known: list[str]) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"unknown parameter {key}{did_you_mean(key, known)}"
    message = message.removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


@lru_cache
def _version_of(builtin: str) -> str:
    return BUILTIN[builtin].version()
