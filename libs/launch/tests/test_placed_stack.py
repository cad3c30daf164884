"""A placed stack follows its file, whatever of it failed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import StackConfig
from flotilla_core.errors import InvalidConfig
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import PlacedStack, Seen
from flotilla_launch.state import PlacedFile


class Places:
    """An engine that notes how many rewards a stack has, and refuses once in between if it is told to."""

    name, listing, look_every_s, queue_limit_s, changes_in_place = "places", "", 0.01, 0, False
    refuses, rewards = False, 0

    def __init__(self, file: Path) -> None:
        self._file = file

    def plan(self, *_: Any) -> list[Any]:
        return []

    async def accept(self, stack: StackConfig, _: Any) -> StackConfig:
        return stack

    async def begin(self, _: StackConfig, placed: PlacedFile) -> PlacedFile:
        return placed

    async def follow(self, stack: StackConfig, placed: PlacedFile, *_: Any) -> bool:
        if self.refuses:
            raise InvalidConfig("a secret is missing")
        placed.write(self._file)
        self.rewards = stack.reward.replicas
        return False

    async def look(self, *_: Any) -> Seen:
        return Seen([])


async def test_a_change_of_replicas_that_failed_is_made_by_the_next_up(tmp_path: Path) -> None:
    paths = StackPaths.of(tmp_path, "mine")
    engine: Any = Places(paths.placed_file)
    launcher = PlacedStack(paths, engine)

    async def up(rewards: int) -> None:
        stack = StackConfig.model_validate(
            {"name": "mine", "state_dir": tmp_path, "reward": {"replicas": rewards}}
        )
        await launcher.place(stack, on_progress=lambda _: None, on_wait=lambda _: None)

    await up(1)
    engine.refuses = True
    with pytest.raises(InvalidConfig, match="a secret is missing"):
        await up(3)
    engine.refuses = False
    await up(3)
    assert engine.rewards == 3
