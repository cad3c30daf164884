"""The processes of a fleet that something may happen to, by what they are.

Invariant: a process is looked up when it is asked for, so one that was started again is found under its name.
"""

from __future__ import annotations

import json
from contextlib import suppress
from enum import StrEnum

import psutil

from flotilla.common.v1.registration_pb2 import Registration
from flotilla_testing.stack import Stack


class Victim(StrEnum):
    """What a process is to the run."""

    GENERATOR = "generator"
    REWARD = "reward replica"
    RANK_0 = "trainer rank 0"
    RANK_1 = "trainer rank 1"
    FRONT = "trainer front"
    COORDINATOR = "coordinator"
    NATS = "NATS"


RANKS = {Victim.RANK_0: 0, Victim.RANK_1: 1}
SLOTS = {Victim.FRONT: "trainer", Victim.COORDINATOR: "coordinator"}


def process_of(stack: Stack, victim: Victim, slot: str) -> psutil.Process:
    """The process that fills the part now; `slot` names which of several replicas."""
    if victim in RANKS:
        return rank_of(stack, RANKS[victim])
    if victim is Victim.NATS:
        nats = nats_of(stack)
        assert nats is not None, "NATS is not there: its launcher starts it again"
        return nats
    return stack.process(SLOTS.get(victim, slot))


def nats_of(stack: Stack) -> psutil.Process | None:
    """None for a moment after it died."""
    launcher = psutil.Process(json.loads((stack.directory / "launcher.json").read_text())["pid"])
    with suppress(psutil.NoSuchProcess):  # one ended between two looks
        for child in launcher.children(recursive=True):
            if "nats-server" in child.name() and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def lives(stack: Stack, registered: Registration) -> bool:
    """Whether its slot is filled by this very instance; a killed one stays registered until its heartbeat is missed."""
    try:
        announced = json.loads((stack.directory / "instances" / f"{registered.name}.json").read_text())
        ended = psutil.Process(announced["pid"]).status() == psutil.STATUS_ZOMBIE
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False
    return bool(announced["instance_id"] == registered.instance_id) and not ended


def rank_of(stack: Stack, rank: int, gang: str = "trainer") -> psutil.Process:
    """The process of a rank, by the name that it bears."""
    for child in stack.process(gang).children(recursive=True):
        if child.name().startswith(f"rank-{rank} "):
            return child
    raise AssertionError(f"{gang} has no rank {rank}")
