"""What one step taught whom."""

from __future__ import annotations

from dataclasses import dataclass

from flotilla.trainer.v1 import trainer_pb2 as pb


@dataclass(frozen=True)
class Learned:
    """The updates of one step."""

    policy: pb.UpdateResult | None
    """None in steps in which only the critic learns."""
    critic: pb.UpdateResult | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The policy's under their own names, the critic's under `critic/`."""
        metrics = {} if self.policy is None else dict(self.policy.metrics)
        if self.critic is not None:
            metrics |= {f"critic/{name}": value for name, value in self.critic.metrics.items()}
        return metrics

    @property
    def skipped(self) -> dict[str, str]:
        """Why whose update was not made."""
        updates = {"update": self.policy, "update of the critic": self.critic}
        return {name: update.skipped for name, update in updates.items() if update and update.skipped}

    @property
    def skipped_steps(self) -> list[str]:
        """The optimizer steps that were left out of updates that were made."""
        updates = {"the policy": self.policy, "the critic": self.critic}
        return [
            f"{step} ({name})" for name, update in updates.items() if update for step in update.skipped_steps
        ]
