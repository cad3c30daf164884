"""The processes of a fleet that something may happen to, by what they are.

Invariant: a process is looked up when it is asked for, so one that was started again is found under its name.
"""

from __future__ import annotations

import json
from contextlib import suppress
from enum import StrEnum

import psutil

from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch.records import StackRecord
from flotilla_launch.state import LauncherFile, read_json
from flotilla_testing.stack import Stack, wait_until


class Victim(StrEnum):
    """The part that a process plays for the run."""

    GENERATOR = "generator"
    REWARD = "reward replica"
    RANK_0 = "trainer rank 0"
    RANK_1 = "trainer rank 1"
    FRONT = "trainer front"
    COORDINATOR = "coordinator"
    NATS = "NATS"
    LAUNCHER = "launcher"
    GUARDIAN = "guardian"
    ENVIRONMENT = "environment replica"
    ENVIRONMENT_WORKER = "environment worker"

    @property
    def plays(self) -> bool:
        """Return whether it only has work in a run with episodes."""
        return self in (Victim.ENVIRONMENT, Victim.ENVIRONMENT_WORKER)


PLAYERS = (Victim.GENERATOR, Victim.COORDINATOR, Victim.ENVIRONMENT, Victim.ENVIRONMENT_WORKER)
"""An episode passes through these."""
RANKS = {Victim.RANK_0: 0, Victim.RANK_1: 1}
WORKER = "flotilla_workers.worker"
WORKER_WITHIN_S = 60.0
SLOTS = {Victim.FRONT: "trainer", Victim.COORDINATOR: "coordinator"}


def process_of(stack: Stack, victim: Victim, slot: str) -> psutil.Process:
    """Return the process that fills the part now; `slot` names which of several replicas."""
    if victim in RANKS:
        return rank_of(stack, RANKS[victim])
    if victim is Victim.NATS:
        nats = nats_of(stack)
        assert nats is not None, "NATS is not there: its launcher starts it again"
        return nats
    if victim is Victim.LAUNCHER:
        launcher = launcher_of(stack)
        assert launcher is not None, "the launcher is not there: its guardian starts it again"
        return launcher
    if victim is Victim.GUARDIAN:
        guardian = guardian_of(stack)
        assert guardian is not None, "the guardian is not there: its launcher starts it again"
        return guardian
    if victim is Victim.ENVIRONMENT_WORKER:
        return worker_of(stack, slot)
    return stack.process(SLOTS.get(victim, slot))


def nats_of(stack: Stack) -> psutil.Process | None:
    """None for a short time after it died."""
    record = StackRecord.read(stack.directory / "processes.json")
    for process in record.processes if record is not None else ():
        if process.name == "nats" and process.identity is not None and process.alive:
            with suppress(psutil.NoSuchProcess):  # it ended between two looks
                return psutil.Process(process.identity.pid)
    return None


def processes_of(stack: Stack) -> dict[str, ProcessIdentity | None]:
    """Return every process that the launcher looks after, by its slot's name."""
    record = StackRecord.read(stack.directory / "processes.json")
    return {process.name: process.identity for process in record.processes} if record is not None else {}


def launcher_of(stack: Stack) -> psutil.Process | None:
    """None from its death until the next one says where it is."""
    file = LauncherFile.read(stack.directory / "launcher.json")
    return psutil.Process(file.pid) if file is not None and file.identity.alive() else None


def guardian_of(stack: Stack) -> psutil.Process | None:
    """None from its death until the next one has its lock."""
    values = read_json(stack.directory / "guardian.json")
    if values is None or not (identity := ProcessIdentity(**values)).alive():
        return None
    return psutil.Process(identity.pid)


def lives(stack: Stack, registered: Registration) -> bool:
    """Whether its slot is filled by this very instance; a killed one stays registered until its heartbeat is missed."""
    try:
        announced = json.loads((stack.directory / "instances" / f"{registered.name}.json").read_text())
    except FileNotFoundError:
        return False
    ours = bool(announced["instance_id"] == registered.instance_id)
    return ours and ProcessIdentity.of(announced["pid"]) is not None


def worker_of(stack: Stack, slot: str) -> psutil.Process:
    """Return the worker of an environment replica, which holds the episodes of a run."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        with suppress(psutil.NoSuchProcess):  # it ended between two looks
            children = stack.process(slot).children(recursive=True)
            found[:] = [child for child in children if WORKER in child.cmdline() and not child.children()]
        return bool(found)

    wait_until(f"a worker of {slot}", is_there, WORKER_WITHIN_S)
    return found[0]


def rank_of(stack: Stack, rank: int, gang: str = "trainer") -> psutil.Process:
    """Return the process of a rank, by the name that it bears."""
    for child in stack.process(gang).children(recursive=True):
        if child.name().startswith(f"rank-{rank} "):
            return child
    raise AssertionError(f"{gang} has no rank {rank}")
