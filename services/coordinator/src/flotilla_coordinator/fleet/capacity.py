"""Works out what a run needs of the fleet, and refuses one more run that the fleet has no capacity for.

Invariant: a run that is alone is always admitted, and waits for what it needs; the refusal of another run names the
runs that hold each service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.roles import POLICY, process_name, section_of


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that a run asks of the fleet: a gang of each role, and generators where it draws samples."""

    roles: tuple[str, ...] = (POLICY,)
    generates: bool = True
    most_generators: int | None = None
    """The most generators that the run takes; None takes an even share of all."""

    @classmethod
    def of(cls, config: RunConfig) -> ResourceRequest:
        """Derive the request from the configuration of the run."""
        algorithm = config.algorithm
        learns_from_samples = isinstance(algorithm, PolicyConfig) or config.loop == "client"
        evaluates_samples = config.evaluation is not None and not config.evaluates_pairs
        beside = algorithm.gangs_beside_the_policy if isinstance(algorithm, PolicyConfig) else ()
        return cls(
            roles=(POLICY, *beside),
            generates=learns_from_samples or evaluates_samples,
            most_generators=config.rollout.generators,
        )


def require_gang(
    role: str,
    slots: Collection[str],
    holders: Mapping[str, str],
    claimants: Collection[str],
    refused: Sequence[str] = (),
) -> None:
    """Refuse a run where no gang of the role is left for it.

    `holders` gives the run of a slot; claimants without a slot will take one. `refused` says why other gangs do not
    count.
    """
    if len({*slots, *holders}) > len(claimants):
        return
    name = process_name(role)
    by_run = {run_id: slot for slot, run_id in holders.items()}
    users = [f"run {run_id} is using {_called(by_run.get(run_id, name), name)}" for run_id in claimants]
    raise FailedPrecondition(
        ", ".join(users),
        why=", ".join([f"each run needs a {name} of its own, and there is no other one", *refused]),
        next_step=f"{_wait_or_stop(claimants)}, or start the stack with more (`{section_of(role)}.replicas` in "
        "stack.yaml)",
    )


def require_generator(
    slots: Collection[str], claimants: Collection[str], refused: Sequence[str] = ()
) -> None:
    """Refuse a run where no generator is left for it; `refused` says why other generators do not count."""
    if len(slots) > len(claimants):
        return
    runs = ", ".join(claimants)
    raise FailedPrecondition(
        f"there is no generator for another run: {len(slots)} for run {runs}",
        why=", ".join(["each run that samples needs at least one", *refused]),
        next_step=f"start another one (`flotilla scale generator {len(claimants) + 1}`); "
        f"or {_wait_or_stop(claimants)}",
    )


def _called(slot: str, name: str) -> str:
    return f"the {name}" if slot == name else slot


def _wait_or_stop(claimants: Collection[str]) -> str:
    first = next(iter(claimants))
    return f"wait for one (`flotilla run watch {first}`), stop one (`flotilla run stop {first}`)"
