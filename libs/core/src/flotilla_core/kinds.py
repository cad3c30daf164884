"""The kinds of services: one row each, which launchers, the fleet and the command line read.

Invariants: the rows are in the order in which a stack starts its services, so what boots longest comes first. The
name of a kind is that of `ServiceKind`; its executable and its image are `flotilla-NAME`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flotilla.common.v1 import registration_pb2 as reg

EPISODES = "episodes"
"""The name in `Registration.capacity` by which a trainer says that it reads samples of several sequences."""


@dataclass(frozen=True)
class Kind:
    """A kind of service, by what sets it apart from the others."""

    number: reg.ServiceKind.ValueType
    boots: str
    """The slow part of a start, in words for who waits for it."""
    section: str
    """The section of the stack file, empty for what the section of another kind asks for."""
    node: str
    """The section of `slurm` and of `ray` with its share of a node; without one on Slurm it shares the head."""
    is_gang: bool = False
    """Processes that belong to gangs, each described by the section of its role."""
    scales: bool = False
    """Replicas whose number may change while the stack lives: `replicas` of its section, and those of `attach`."""
    shared: bool = False
    """All of them serve every run; one that is not shared belongs to one run at a time."""
    optional: bool = False
    """Need of some runs alone."""
    loads_model: bool = False
    """Need of the folder of its model, and of shared memory for torch."""
    capacity: str = ""
    """The name in `Registration.capacity` of how much work one takes relative to the others; empty: all alike."""
    overcommit: float = math.inf
    """The multiple of what one runs at once that it takes; the rest waits for the first free one."""
    ends: int = 0
    """The stage of an ordered end in which it ends: a front needs its ranks until it has ended, and all send their last
    spans to the coordinator."""

    @property
    def name(self) -> str:
        return kind_name(self.number)


KINDS = (
    Kind(
        reg.SERVICE_KIND_GENERATOR,
        "loads the model into its engine",
        section="generator",
        node="generator",
        scales=True,
        loads_model=True,
        capacity="running_samples",
        overcommit=1.25,
    ),
    Kind(
        reg.SERVICE_KIND_TRAINER,
        "starts its ranks, which load the model",
        section="trainer",
        node="trainer",
        is_gang=True,
        loads_model=True,
    ),
    Kind(
        reg.SERVICE_KIND_COORDINATOR,
        "opens the ledger and the timeline",
        section="coordinator",
        node="head",
        ends=2,
    ),
    Kind(
        reg.SERVICE_KIND_REWARD,
        "starts its workers",
        section="reward",
        node="reward",
        scales=True,
        shared=True,
        capacity="workers",
    ),
    Kind(
        reg.SERVICE_KIND_ENVIRONMENT,
        "opens its port",
        section="environment",
        node="environment",
        scales=True,
        shared=True,
        optional=True,
        capacity="workers",
    ),
    Kind(reg.SERVICE_KIND_RANKS, "opens its port", section="", node="trainer", is_gang=True, ends=1),
)
END_STAGES = range(3)

SCALABLE = tuple(kind.number for kind in KINDS if kind.scales)
OF_GANGS = tuple(kind.number for kind in KINDS if kind.is_gang)
SHARED = tuple(kind.number for kind in KINDS if kind.shared)
WITH_MODEL = tuple(kind.number for kind in KINDS if kind.loads_model)

_BY_NUMBER = {kind.number: kind for kind in KINDS}


def kind_of(number: reg.ServiceKind.ValueType) -> Kind:
    """Return the row of a kind of service."""
    return _BY_NUMBER[number]


def kind_name(number: reg.ServiceKind.ValueType) -> str:
    """`generator` for SERVICE_KIND_GENERATOR; also for a number that has no row."""
    return reg.ServiceKind.Name(number).removeprefix("SERVICE_KIND_").lower()
