"""Holds the requests of a user to an active run: to end, to pause, or to change settings.

Invariants: requests take effect between two steps and at no other time. They survive the loss of a gang, because the
run restarts with the same requests. The newest configuration wins. Only the settings in a fixed list may change, and
any other is refused by name; a changed configuration passes every check that a new run passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.config.run import LIVE_KEYS
from flotilla_core.errors import InvalidRequest


class RunControl:
    """The user's requests, and a way to wait for another one."""

    def __init__(self, config: RunConfig, *, paused: bool = False) -> None:
        self._changed = asyncio.Event()
        self.config = config
        """The configuration with every accepted change; the loop applies it from its next step on."""
        self.paused = paused
        self.stop_requested = False
        self.over = False
        """True once no step follows, so that there is nothing left to pause or to change."""

    def stop(self) -> None:
        """End after the current step."""
        self.stop_requested = True
        self._wake()

    def pause(self) -> None:
        """Begin no further step."""
        self.paused = True
        self._wake()

    def unpause(self) -> None:
        """End a pause."""
        self.paused = False
        self._wake()

    def configure(self, config: RunConfig) -> None:
        """Use another configuration from the next step on."""
        self.config = config
        self._wake()

    def try_again(self) -> None:
        """Check at once whether the thing that the run waits for is available."""
        self._wake()

    @property
    def waits(self) -> bool:
        """Return whether the next step must wait."""
        return self.paused and not self.stop_requested

    async def changed(self) -> None:
        """Wait for the next request."""
        await self._changed.wait()

    def _wake(self) -> None:
        # Each waiter holds the present event; the next request gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()


def changed_config(config: RunConfig, assignments: Sequence[str], steps_done: int) -> RunConfig:
    """Return the configuration with `key.path=value` applied, or raise the reason against it."""
    keys = [assignment.partition("=")[0].strip() for assignment in assignments]
    if not keys:
        raise InvalidRequest("nothing is to be changed", next_step="name one or more key=value")
    if fixed := [key for key in keys if key not in LIVE_KEYS]:
        raise InvalidRequest(
            f"{', '.join(fixed)} cannot change while a run is active",
            next_step=f"these can: {', '.join(LIVE_KEYS)}; for anything else fork the run: flotilla run fork",
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
    """Return the live settings that differ, each with its old and its new value."""
    values = {key: (_value(before, key), _value(after, key)) for key in LIVE_KEYS}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def described(changes: dict[str, tuple[Any, Any]]) -> str:
    """Describe the changes for people."""
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())


def _value(config: RunConfig, key: str) -> Any:
    """Return the value of a key; None where its section is absent."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
