"""Makes the first checkpoint of a forked run out of a checkpoint of another one.

Invariants: the run that is forked is only read. The copy has its files as hard links where both are on one disk, so it
takes no room and outlives the original. Only the progress differs, which is inside the sealed copy and says what of the
state does not count: a fork that loses its gang before its own first checkpoint begins again in the same way, and so
does a fork of it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_coordinator.data.training_sets import reads_of
from flotilla_coordinator.rollouts.prompt_counts import most_prompts_per_step, steps_ahead
from flotilla_coordinator.runs.checkpoints import FILE_NAME, Progress
from flotilla_coordinator.trainers.spec import critic_of, objective
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.config import RunConfig
from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.version import Version


@dataclass(frozen=True)
class Forked:
    """The parts that a new run continues from, and those that it begins anew."""

    source: Path
    """The checkpoint."""
    progress: Progress
    """The progress of the new run."""
    fresh_data: bool
    """True where the data is drawn from its start."""
    passed_over: int = 0
    """The most prompts that the other run had drawn for later steps, which the new one does not train."""

    @classmethod
    def of(
        cls, run_id: str, source: Path, before: RunConfig, after: RunConfig, *, fresh_optimizer: bool
    ) -> Forked:
        """Return what the run `after` takes from a checkpoint of `before`; raise where it cannot continue from it."""
        progress = Progress.of(source)
        _require_continuable(before, after, progress.steps_done)
        fresh_data = _drawn_by(before) != _drawn_by(after)
        _require_known_level(after, fresh_data)
        return cls(
            source,
            Progress(
                run_id,
                progress.steps_done,
                Version(0, progress.version.step),
                None if fresh_data else progress.cursor,
                fresh_optimizer=progress.fresh_optimizer or fresh_optimizer,
                fresh_objective=progress.fresh_objective or _learns_by(before) != _learns_by(after),
            ),
            fresh_data,
            0 if fresh_data else _drawn_ahead(before, progress.steps_done),
        )

    def write(self, shelf: CheckpointShelf) -> None:
        """Write the checkpoint of the new run."""
        name = self.source.name
        aside = shelf.begin(name)
        try:
            manifest = Manifest.read(self.source)
            for file in manifest.files:
                _link(self.source / file, aside / file)
            manifest.renew(aside, {FILE_NAME: self.progress.to_bytes().decode()})
            shelf.publish(name)
        except FileNotFoundError as error:
            raise NotFound(
                "the checkpoint is gone",
                where=str(self.source),
                why=f"{error.filename} is missing; its run may have removed it for a newer one",
                next_step="fork from another one: see `flotilla checkpoint list`",
            ) from error
        finally:
            shelf.discard(name)

    @property
    def described(self) -> str:
        """Say what is kept, for people."""
        optimizer = "begins without moments" if self.progress.fresh_optimizer else "keeps its moments"
        data = "is drawn from its start" if self.fresh_data else "goes on where it was"
        if self.passed_over:
            data += f", behind up to {self.passed_over} prompts that were drawn for later steps and are not trained"
        return f"the optimizer {optimizer}, the data {data}"


def _require_continuable(before: RunConfig, after: RunConfig, steps_done: int) -> None:
    """Raise where the weights of a checkpoint are none of the new run, or leave it no step."""
    if after.steps <= steps_done:
        raise InvalidConfig(
            f"steps is {after.steps}, and {steps_done} steps are done at the checkpoint",
            next_step=f"set steps to more than {steps_done}: steps are counted from the start of the first run",
        )
    for key in ("lora", "initial_weights"):
        if getattr(before, key) != getattr(after, key):
            raise InvalidConfig(
                f"{key} is another one than that of the run that is forked",
                why="the checkpoint holds weights that were trained from it",
                next_step=f"leave {key} as it is, or start a new run from the checkpoint's folder `model`",
            )
    if before.trains_reward_model != after.trains_reward_model:
        raise InvalidConfig(
            "a reward model and a language model have different heads",
            next_step="start a new run from the checkpoint's folder `model`",
        )
    if critic_of(after) is not None and critic_of(before) is None:
        raise InvalidConfig(
            "the run has a critic, and the checkpoint has none",
            next_step="start a new run from the checkpoint's folder `model`",
        )


def _require_known_level(config: RunConfig, fresh_data: bool) -> None:
    """Raise where the level of the data goes by rewards, which are in the ledger of the run that is forked alone."""
    curriculum = config.data.curriculum
    if not fresh_data and curriculum is not None and curriculum.reward is not None:
        raise InvalidConfig(
            "the level of the data that the run has reached is unknown to a fork",
            where="data.curriculum.reward",
            why="the level goes by the rewards of earlier steps, which a fork does not take over",
            next_step="set data.curriculum.every_steps instead, or set another seed to begin the data anew",
        )


def _drawn_ahead(config: RunConfig, steps_done: int) -> int:
    """Return the most prompts that are drawn for steps that are not done."""
    if not config.draws_samples or not steps_done:
        return 0
    steps = min(steps_ahead(config.rollout), config.steps - steps_done)
    return steps * most_prompts_per_step(config.rollout)


def _learns_by(config: RunConfig) -> tuple[Any, ...]:
    """Return what the objective adapts to: its own settings, and where rewards come from."""
    return objective(config), config.rewards, config.reward_mode, config.environment


def _drawn_by(config: RunConfig) -> tuple[Any, ...]:
    """Return what decides which prompt follows which."""
    return config.data, config.seed, reads_of(config)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(source, target)
