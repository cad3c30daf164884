"""One replica as a pool sees it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import grpc

from flotilla.common.v1.registration_pb2 import Registration

StubT = TypeVar("StubT")

# ready: takes work. ejected: a call failed and its health is probed, or its build is another one. draining: it never
# takes work again.
ReplicaState = Literal["ready", "ejected", "draining"]


@dataclass(frozen=True)
class Load:
    """What a lease puts on a replica."""

    cost: int
    """By which replicas are compared: tokens, items."""
    places: int = 1
    """Of those that run side by side."""


@dataclass(eq=False)
class Replica(Generic[StubT]):
    """A channel to one instance, and what it works on for us."""

    registration: Registration
    channel: grpc.aio.Channel
    stub: StubT
    size: int = 1
    """How much it carries beside the others."""
    overcommit: float = math.inf
    """How many times what it runs it takes, so that what would only wait there can go elsewhere."""
    runs: int = 1
    """Places that it runs side by side, as far as is known."""
    state: ReplicaState = "ready"
    outstanding: int = 0
    """Cost of the work that is leased out to it."""
    places: int = 0
    """And how many places that takes."""
    leases: int = 0
    """How many leases that is; the channel stays open until none is left."""
    why: str = ""
    """Why it is not ready."""
    turn: int = 0
    """When it got its last lease: equals take turns."""
    ejections: int = field(default=0, repr=False)
    returned_at: float = field(default=0.0, repr=False)
    _busy_before_s: float = field(default=0.0, repr=False)
    _busy_since: float = field(default=0.0, repr=False)

    @property
    def full(self) -> bool:
        """Whether further work would wait there."""
        return self.places >= self.overcommit * self.runs

    def heard(self, waiting: int) -> None:
        """Of the places that it has, so many wait: it runs the others, whatever its registration says."""
        self.runs = min(self.size, max(1, self.places - waiting)) if waiting else self.size

    def take(self, load: Load) -> None:
        """One more lease."""
        if self.leases == 0:
            self._busy_since = time.monotonic()
        self.outstanding += load.cost
        self.places += load.places
        self.leases += 1

    def give_back(self, load: Load) -> None:
        """One lease fewer."""
        self.outstanding -= load.cost
        self.places -= load.places
        self.leases -= 1
        if self.leases == 0:
            self._busy_before_s += time.monotonic() - self._busy_since

    @property
    def busy_s(self) -> float:
        """How long it has had any lease of ours so far."""
        return self._busy_before_s + (time.monotonic() - self._busy_since if self.leases else 0.0)

    @property
    def instance_id(self) -> str:
        return self.registration.instance_id

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def address(self) -> str:
        return self.registration.address
