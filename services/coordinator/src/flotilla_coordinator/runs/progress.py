"""Where a run stands between two steps: the coordinator's part of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_core.errors import Damaged, Mismatch
from flotilla_core.version import Version

FILE_NAME = "coordinator.json"


@dataclass(frozen=True)
class Progress:
    """Everything that the loop carries from one step to the next."""

    run_id: str
    steps_done: int
    version: Version
    cursor: dict[str, Any] | None
    """Where the next prompt comes from; None before the first step."""
    last_accuracy: float | None = None

    def to_bytes(self) -> bytes:
        """JSON, as it lies in a checkpoint."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Progress:
        """What `to_bytes` made."""
        try:
            values = json.loads(content)
            return cls(**{**values, "version": Version(*values["version"])})
        except (ValueError, KeyError, TypeError) as error:
            raise Mismatch(
                "the checkpoint was not made by a run that this Flotilla can continue",
                where=where,
                why=repr(error),
                next_step="start a new run with initial_weights set to its model folder",
            ) from error

    @classmethod
    def of(cls, checkpoint: Path) -> Progress:
        """The one inside a checkpoint."""
        path = checkpoint / FILE_NAME
        try:
            return cls.from_bytes(path.read_bytes(), str(path))
        except OSError as error:
            raise Damaged("the checkpoint is damaged", where=str(path), why=str(error)) from error
