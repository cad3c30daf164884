"""Decides which prompts a step gets: those recorded for it in the ledger, then the next ones of the data.

Invariants: groups are recorded in the order in which they are drawn, so all groups since a cursor are in the ledger,
and no prompt of an epoch is drawn twice. A step that was begun before has the groups that it had, with their prompts
and their bound, even if they were drawn between those of other steps. A group counts for one step at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from flotilla_coordinator.data.prompt_source import PromptSource, other_data
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import AdmittedGroup
from flotilla_coordinator.rollouts.group import FinishedGroup, GroupRequest
from flotilla_coordinator.rollouts.prompt_counts import issued_per_step, most_prompts_per_step, steps_ahead
from flotilla_core import ids
from flotilla_core.config import RolloutConfig
from flotilla_core.version import Version


@dataclass(eq=False)
class GroupTask:
    """A group that is being generated and scored."""

    request: GroupRequest
    place: int
    """The position of the group in the order of admission."""
    task: asyncio.Task[FinishedGroup]

    @property
    def usable(self) -> bool:
        """Return whether it has ended with samples that may be trained; raise its error if it failed."""
        return self.task.done() and bool(self.task.result().group.samples)


class PromptQueue:
    """Draws prompts for steps, and keeps the groups that are under way for each."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        total_steps: int,
        prompts: PromptSource,
        ledger: Ledger,
        start: Callable[[GroupRequest], asyncio.Task[FinishedGroup]],
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._total_steps = total_steps
        self._prompts = prompts
        self._ledger = ledger
        self._start = start
        self._places = count()
        self._steps: dict[int, list[GroupTask]] = {}
        self._recorded: dict[int, list[tuple[Prompt, AdmittedGroup]]] = {}
        self._next_step = 0

    async def restore(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Begin after so many steps; the ledger's groups of later steps come before any new prompt."""
        if cursor is not None:
            self._prompts.restore(cursor)
        self._next_step = steps_done
        places = []
        for group in await self._ledger.admitted_groups(self._run_id, steps_done):
            place = ids.prompt_of_group(group.group_id)
            prompt = self._prompts.known(*place)
            if not np.array_equal(prompt.token_ids, group.prompt_token_ids):
                raise other_data(f"prompt {place[1]} is another one than the run's samples answer")
            self._recorded.setdefault(group.step, []).append((prompt, group))
            places.append(place)
        # A cursor that is saved from now on is behind the prompts that the ledger holds for later steps.
        self._prompts.pass_by(places)

    def reconfigure(self, config: RolloutConfig, total_steps: int) -> None:
        """Use other settings from the next admission on."""
        self._config, self._total_steps = config, total_steps

    def admit(self, step: int, version: Version) -> None:
        """Issue every step that may begin during `step` and has not been issued yet."""
        last = min(step + steps_ahead(self._config), self._total_steps - 1)
        while self._next_step <= last:
            new, self._next_step = self._next_step, self._next_step + 1
            groups = self._steps.setdefault(new, [])
            spare = self._spare_beside(new)
            wanted = max(self._config.prompts_per_step, issued_per_step(self._config) - spare)
            recorded = self._recorded.pop(new, [])
            if recorded:
                # Its batch may have been full: a surplus group could take the place of one that was in it.
                wanted = self._config.prompts_per_step
            groups += [
                self._group_task(prompt, new, version, new - step, group) for prompt, group in recorded
            ]
            self.draw(new, wanted - len(groups), version, new - step)

    def draw(self, step: int, number: int, version: Version, ahead: int = 0) -> list[GroupTask]:
        """Issue up to `number` more groups for a step, within its limit."""
        groups = self._steps[step]
        room = most_prompts_per_step(self._config) - len(groups)
        drawn = [
            self._group_task(self._prompts.next(step), step, version, ahead) for _ in range(min(number, room))
        ]
        groups += drawn
        return drawn

    def groups(self, step: int) -> list[GroupTask]:
        """Return all groups that were admitted for a step or carried into it."""
        return list(self._steps[step])

    def carry_over(self, groups: list[GroupTask], step: int) -> None:
        """Let groups of the step before count for `step`."""
        self._steps.setdefault(step, []).extend(groups)

    def end(self, step: int) -> None:
        """Forget the step, which has its batch."""
        del self._steps[step]

    def is_last(self, step: int) -> bool:
        """Return whether this is the last step."""
        return step == self._total_steps - 1

    @property
    def cursor(self) -> dict[str, Any]:
        """Return the place of the next prompt."""
        return self._prompts.cursor

    def close(self) -> list[GroupTask]:
        """Forget everything; return what was under way."""
        groups = [group for step in self._steps.values() for group in step]
        self._steps.clear()
        return groups

    def _spare_beside(self, step: int) -> int:
        """Return the number of groups under way beyond what the other steps need."""
        needed = self._config.prompts_per_step
        return sum(max(0, len(groups) - needed) for other, groups in self._steps.items() if other != step)

    def _group_task(
        self, prompt: Prompt, step: int, version: Version, ahead: int, recorded: AdmittedGroup | None = None
    ) -> GroupTask:
        group_id = ids.group_id(self._run_id, prompt.epoch, prompt.index)
        # A group that is admitted ahead also waits in the generators behind the steps before it.
        limit_s = self._config.sample_timeout_s * (1 + ahead)
        bound = self._config.max_staleness
        if recorded is not None and recorded.max_staleness is not None:
            bound = recorded.max_staleness
        # Not every step makes a version. With `over_issue` a group may wait beyond its step, to the end of the bound.
        oldest_turn = version.step if self._config.over_issue else version.step + ahead - bound
        request = GroupRequest(
            prompt, group_id, step, version, limit_s, bound, recorded is not None, oldest_turn
        )
        return GroupTask(request, next(self._places), self._start(request))
