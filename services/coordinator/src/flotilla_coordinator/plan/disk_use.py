"""What a run leaves on the disk at most.

Invariant: checkpoints are counted as the loop makes them, one every `checkpoint.every_steps` and one at the end, and
weighed as the trainer writes them: float32 weights and moments of all that learns, and all that learns once more in a
folder that others load. While the newest is written, those that it will replace are still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.sizes import shown_bytes
from flotilla_core.config import RunConfig

PAYLOAD_BYTES_PER_TOKEN = 4 + 4 + 6  # token id, logprob, text in the ledger and in the samples file
MODEL = 4
STATE = 4 + 8
"""Bytes of a learning number in a checkpoint: the weight and AdamW's two moments."""


@dataclass(frozen=True)
class DiskUse:
    """Bytes by what they are for."""

    rollouts: int
    export: int
    checkpoint: int
    made: int
    kept: int
    every: int

    @classmethod
    def of(
        cls, config: RunConfig, *, parameters: int, learning: int, critic: int, generated_tokens: int
    ) -> DiskUse:
        """The use of a run over a model of `parameters`, of which `learning` numbers change, and its critic's."""
        every = config.checkpoint.every_steps
        made = -(-config.steps // every) if every else 0
        return cls(
            rollouts=generated_tokens * PAYLOAD_BYTES_PER_TOKEN,
            export=parameters * MODEL if config.export_final else 0,
            checkpoint=(learning + critic) * (STATE + MODEL),
            made=made,
            kept=min(made, config.checkpoint.keep),
            every=every,
        )

    @property
    def total(self) -> int:
        """All of it, at the worst moment."""
        return self.rollouts + self.export + min(self.made, self.kept + 1) * self.checkpoint

    def lines(self) -> Iterator[Line]:
        """As `run plan` shows it."""
        if self.made:
            yield (
                "checkpoints",
                f"{self.made} x {shown_bytes(self.checkpoint)}",
                f"every {self.every} step(s) and at the end; the newest {self.kept} stay",
            )
        else:
            yield "checkpoints", "0", "checkpoint.every_steps is 0: a lost trainer starts the run anew"
        yield (
            "disk",
            f"at most {shown_bytes(self.total)}",
            f"samples in the ledger and the run directory {shown_bytes(self.rollouts)}, "
            f"exported model {shown_bytes(self.export)}, the rest checkpoints",
        )
