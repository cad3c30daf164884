"""What a user wants of a run while it goes on: its end, a pause, other settings.

Invariants: wishes are taken in between two steps and nowhere else; they outlive the loss of a gang, for the run begins
again with the same wishes; the newest configuration wins. The list of settings that may change is closed, and what is
not on it is refused by name; a changed configuration passes every check that a new run passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.errors import InvalidRequest

LIVE_KEYS = (
    "steps",
    "rollout.max_staleness",
    "optimizer.learning_rate",
    "evaluation.every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
)


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

    def unpause(self) -> None:
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


def changed_config(config: RunConfig, assignments: Sequence[str], steps_done: int) -> RunConfig:
    """The configuration with `key.path=value` applied, or why that cannot be."""
    keys = [assignment.partition("=")[0].strip() for assignment in assignments]
    if not keys:
        raise InvalidRequest("nothing is to be changed", next_step="name one or more key=value")
    if fixed := [key for key in keys if key not in LIVE_KEYS]:
        raise InvalidRequest(
            f"{', '.join(fixed)} cannot change while a run goes on",
            next_step=f"these can: {', '.join(LIVE_KEYS)}; for anything else start a new run, with initial_weights "
            "from a checkpoint of this one",
        )
    if "evaluation.every_steps" in keys and config.evaluation is None:
        raise InvalidRequest(
            "the run has no held-out prompts", next_step="a new run can name them in `evaluation`"
        )
    changed = load_text(RunConfig, dump_yaml(config), source=f"run {config.name}", overrides=assignments)
    if changed.steps <= steps_done:
        raise InvalidRequest(
            f"steps is {changed.steps}, but {steps_done} steps are done",
            next_step=f"set more than {steps_done}, or stop the run: flotilla run stop",
        )
    return changed


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The live settings that differ: what each was, and what it is."""
    values = {key: (_value(before, key), _value(after, key)) for key in LIVE_KEYS}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def described(changes: dict[str, tuple[Any, Any]]) -> str:
    """For people: what was and what is."""
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())


def _value(config: RunConfig, key: str) -> Any:
    """None where the section is absent."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
