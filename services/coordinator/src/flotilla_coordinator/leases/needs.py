"""What a run takes of a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_core.roles import POLICY


@dataclass(frozen=True)
class Needs:
    """A gang of each role, and generators where the run asks for samples."""

    roles: tuple[str, ...] = (POLICY,)
    generates: bool = True
    most_generators: int | None = None
    """None takes an even share of all."""

    @classmethod
    def of(cls, config: RunConfig) -> Needs:
        """By the configuration of the run."""
        algorithm = config.algorithm
        learns_from_samples = isinstance(algorithm, PolicyConfig) or config.loop == "client"
        evaluates_samples = config.evaluation is not None and not config.evaluates_pairs
        beside = algorithm.gangs_beside_the_policy if isinstance(algorithm, PolicyConfig) else ()
        return cls(
            roles=(POLICY, *beside),
            generates=learns_from_samples or evaluates_samples,
            most_generators=config.rollout.generators,
        )
