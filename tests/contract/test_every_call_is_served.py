"""A contract lists what its service does and somebody asks for, and nothing that it may do one day."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

import flotilla
from flotilla_coordinator.api.coordinator_servicer import CoordinatorServicer
from flotilla_coordinator.api.loop_servicer import LoopServicer
from flotilla_core.service.operate import OperateServicer
from flotilla_core.transfer import FileServicer
from flotilla_environment.service import EnvironmentServicer
from flotilla_generator.servicer import GeneratorServicer
from flotilla_launch.serve import LauncherServicer
from flotilla_reward.service import RewardServicer
from flotilla_trainer.agent import RankServicer
from flotilla_trainer.front.servicer import TrainerServicer
from flotilla_weights.rendezvous import StoreServicer

SERVICERS = (
    OperateServicer,
    FileServicer,
    CoordinatorServicer,
    LoopServicer,
    GeneratorServicer,
    LauncherServicer,
    EnvironmentServicer,
    RewardServicer,
    TrainerServicer,
    RankServicer,
    StoreServicer,
)
ROOT = Path(flotilla.__path__[0])
CONTRACTS = [
    service
    for path in sorted(ROOT.rglob("*_pb2.py"))
    for service in import_module(
        ".".join(("flotilla", *path.relative_to(ROOT).with_suffix("").parts))
    ).DESCRIPTOR.services_by_name.values()
]


def test_every_service_of_the_contracts_is_known_here() -> None:
    assert len(CONTRACTS) == len(SERVICERS)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_call_of_a_contract_is_served(contract: ServiceDescriptor) -> None:
    (servicer,) = (
        one for one in SERVICERS if any(base.__name__ == f"{contract.name}Servicer" for base in one.mro())
    )
    inherited = [call.name for call in contract.methods if call.name not in vars(servicer)]
    assert inherited == [], "a call that nobody serves does not belong in the contract"


REPOSITORY = Path(__file__).parents[2]
PRODUCTION = "\n".join(
    file.read_text()
    for folder in ("libs", "services")
    for file in sorted((REPOSITORY / folder).glob("*/src/**/*.py"))
    if not file.is_relative_to(REPOSITORY / "libs/proto")
    and not file.is_relative_to(REPOSITORY / "libs/testing")
)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_call_of_a_contract_has_a_caller_outside_of_tests(contract: ServiceDescriptor) -> None:
    names = [call.name for call in contract.methods]
    idle = [name for name in names if not re.search(rf"[\w)]\.{name}\b", PRODUCTION)]
    assert idle == [], "give it a caller that users want (a command, the SDK), or take it out of the contract"
