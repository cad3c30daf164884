"""What a user wants of a run while it goes on: its end, a pause, other settings.

Invariants: wishes are taken in between two steps and nowhere else; they outlive the loss of a gang, for the run begins
again with the same wishes; the newest configuration wins.
"""

from __future__ import annotations

import asyncio

from flotilla_core.config import RunConfig


class RunControl:
    """The wishes, and the way to wait for another one."""

    def __init__(self, config: RunConfig, *, paused: bool = False) -> None:
        self._changed = asyncio.Event()
        self.config = config
        """With every change that was accepted; the loop has taken it in from its next step on."""
        self.paused = paused
        self.stop_requested = False
        self.over = False
        """No step follows, so there is nothing left to pause or to change."""

    def stop(self) -> None:
        """End after the current step."""
        self.stop_requested = True
        self._wake()

    def pause(self) -> None:
        """Begin no further step."""
        self.paused = True
        self._wake()

    def go_on(self) -> None:
        """Take a pause back."""
        self.paused = False
        self._wake()

    def configure(self, config: RunConfig) -> None:
        """Go on by another configuration."""
        self.config = config
        self._wake()

    def try_again(self) -> None:
        """Look at once whether what the run waits for is there."""
        self._wake()

    @property
    def waits(self) -> bool:
        """Whether the next step has to wait."""
        return self.paused and not self.stop_requested

    async def changed(self) -> None:
        """Wait for the next wish."""
        await self._changed.wait()

    def _wake(self) -> None:
        # Each waiter holds the event of its time: a new one for the next wish.
        self._changed.set()
        self._changed = asyncio.Event()
