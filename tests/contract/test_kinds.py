"""The table of service kinds has a row for each kind, and what a row names is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import ConfigModel, StackConfig
from flotilla_core.kinds import END_STAGES, KINDS, Kind

ROOT = Path(__file__).resolve().parents[2]
WITH_SECTION = [kind for kind in KINDS if kind.section]


def name(kind: Kind) -> str:
    return kind.name


def test_every_kind_that_a_stack_starts_has_a_row() -> None:
    numbers = {*ServiceKind.values()} - {ServiceKind.SERVICE_KIND_UNSPECIFIED}
    assert sorted(kind.number for kind in KINDS) == sorted(numbers - {ServiceKind.SERVICE_KIND_LAUNCHER})


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_a_package_of_a_service_has_the_executable(kind: Kind) -> None:
    projects = [tomllib.loads(file.read_text("utf-8")) for file in ROOT.glob("services/*/pyproject.toml")]
    commands = {command for project in projects for command in project["project"].get("scripts", {})}
    assert f"flotilla-{kind.name}" in commands


@pytest.mark.parametrize("kind", WITH_SECTION, ids=name)
def test_the_stack_file_has_the_keys_that_launchers_read(kind: Kind) -> None:
    section = getattr(StackConfig(), kind.section)
    assert isinstance(section, ConfigModel)
    read = {"environment", "attach"} | ({"replicas"} if kind.scales or kind.is_gang else set())
    assert read <= type(section).model_fields.keys()


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_ray_knows_what_a_service_takes_and_the_stack_ends_it(kind: Kind) -> None:
    assert kind.node in type(StackConfig().ray).model_fields
    assert kind.ends in END_STAGES
