"""Where the prompts of a run stand whose client draws them itself, call by call.

Invariant: nothing is admitted here and no batch is made; what the ledger holds of such a run is never asked for again.
"""

from __future__ import annotations

from typing import Any, NoReturn

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_core.config import RunConfig
from flotilla_core.version import Version


class ClientSource:
    """The data set's place, put back where a checkpoint left it."""

    samples_from_policy = True

    def __init__(self, prompts: PromptSource) -> None:
        self._prompts = prompts

    async def go_on(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Draw from there on."""
        if cursor is not None:
            self._prompts.restore(cursor)

    def reconfigure(self, config: RunConfig) -> None:
        """What may change concerns steps, which the client makes."""

    def admit(self, step: int, version: Version) -> None:
        """Nothing to prepare: the client asks for groups when it wants them."""

    async def batch(self, step: int, version: Version) -> NoReturn:
        """The client makes its batches."""
        raise AssertionError("a run whose client makes the steps is not asked for a batch")

    async def close(self) -> None:
        """Nothing is under way here."""
