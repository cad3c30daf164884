"""Reads the data sets of a run as its algorithm needs them, and numbers their prompts through.

Invariants: the prompts of a set have the numbers after those of the set before it, with dropped rows counted. An order
by difficulty changes no number. A run does not start where a line lacks the column of teachers, or names a teacher that
the run does not ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla_coordinator.data.pairs import load_pairs
from flotilla_coordinator.data.prompts import Load, Prompt, PromptFile, load_prompts
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config import (
    DataConfig,
    EvaluationConfig,
    HeldOutSet,
    PolicyConfig,
    RewardTermConfig,
    RunConfig,
    TrainingSet,
)
from flotilla_core.config.document import describe
from flotilla_core.config.roles import AskedTeachers
from flotilla_core.errors import InvalidConfig
from flotilla_core.roles import teacher_role


@dataclass(frozen=True)
class LoadedSet:
    """One data set with its prompts."""

    name: str
    path: Path
    file: PromptFile
    share: float
    """The share of the draws."""


def read_sets(config: DataConfig, tokenizer: Tokenizer, load: Load) -> list[LoadedSet]:
    """Read all of `data.train`."""
    train = config.train
    sets = (TrainingSet(path=train),) if isinstance(train, Path) else train
    names = [one.name or one.path.stem for one in sets]
    _refuse_equal(names)
    weights = sum(one.weight for one in sets)
    loaded: list[LoadedSet] = []
    first = 0
    for one, name in zip(sets, names, strict=True):
        file = load(one.path, config, tokenizer)
        prompts = file.prompts
        if config.order == "by_field":
            prompts = _by_difficulty(prompts, config.difficulty_field, one.path)
        shown = name if len(sets) > 1 else ""
        numbered = [replace(prompt, index=first + prompt.index, data_set=shown) for prompt in prompts]
        loaded.append(LoadedSet(name, one.path, replace(file, prompts=numbered), one.weight / weights))
        first += file.rows
    return loaded


def joined(sets: Iterable[LoadedSet]) -> PromptFile:
    """Join the data sets as if they were one file."""
    files = [one.file for one in sets]
    return PromptFile(
        [prompt for file in files for prompt in file.prompts],
        dropped=sum(file.dropped for file in files),
        truncated=sum(file.truncated for file in files),
    )


def _refuse_equal(names: list[str]) -> None:
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InvalidConfig(
            f"several data sets are called {repeated[0]!r}",
            where="data.train",
            why="each has metrics under its name",
            next_step="give each a `name` of its own",
        )


def _by_difficulty(prompts: list[Prompt], column: str, path: Path) -> list[Prompt]:
    """Sort in ascending order; equal prompts keep the order of the file."""
    for prompt in prompts:
        value = prompt.info.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidConfig(
                f"column {column!r} is {'not a number' if column in prompt.info else 'missing'}",
                where=f"{path}, row {prompt.index + 1}",
                why="data.order is by_field",
                next_step="give every row a number there, or set data.difficulty_field to another column",
            )
    return sorted(prompts, key=lambda prompt: prompt.info[column])


def training_data(config: RunConfig) -> Load:
    """Return the reader of `data.train`; a client that makes the steps brings its pairs itself."""
    load = load_pairs if config.learns_from_pairs and config.loop == "coordinator" else load_prompts
    algorithm = config.algorithm
    asked = algorithm.asked_teachers if isinstance(algorithm, PolicyConfig) else None
    return load if asked is None or asked.teacher_field is None else _choosing_teachers(load, asked)


@dataclass(frozen=True)
class HeldOut:
    """One held-out file, with all settings that count for its evaluation."""

    name: str
    path: Path
    rewards: tuple[RewardTermConfig, ...]
    success_at: float
    max_prompts: int
    max_response_tokens: int
    samples_per_prompt: int
    temperature: float
    answer_after: str


def held_out_sets(config: RunConfig) -> list[HeldOut]:
    """Return the held-out files of a run; what one leaves out is that of the evaluation, or of the run."""
    evaluation = config.evaluation
    return (
        [] if evaluation is None else [_held_out(one, evaluation, config) for one in evaluation.sets_of_data]
    )


def _held_out(one: HeldOutSet, evaluation: EvaluationConfig, config: RunConfig) -> HeldOut:
    longest = one.max_response_tokens or evaluation.max_response_tokens
    return HeldOut(
        name=one.name or one.path.stem,
        path=one.path,
        rewards=one.rewards or config.rewards,
        success_at=evaluation.success_at if one.success_at is None else one.success_at,
        max_prompts=one.max_prompts or evaluation.max_prompts,
        max_response_tokens=longest or config.rollout.sampling.max_response_tokens,
        samples_per_prompt=one.samples_per_prompt or evaluation.samples_per_prompt,
        temperature=evaluation.temperature if one.temperature is None else one.temperature,
        answer_after=evaluation.answer_after if one.answer_after is None else one.answer_after,
    )


def read_held_out(config: RunConfig, tokenizer: Tokenizer) -> list[tuple[HeldOut, PromptFile]]:
    """Read all of `evaluation.data`, each file with at most `max_prompts` prompts."""
    load = load_pairs if config.evaluates_pairs else load_prompts
    files = [(one, load(one.path, config.data, tokenizer)) for one in held_out_sets(config)]
    return [(one, replace(file, prompts=file.prompts[: one.max_prompts])) for one, file in files]


def _choosing_teachers(load: Load, asked: AskedTeachers) -> Load:
    """Return a reader like `load` that also sets the role of the teacher that scores each prompt's samples."""

    def load_with_teachers(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
        file = load(path, config, tokenizer)
        return replace(file, prompts=[_with_teacher(prompt, asked, path) for prompt in file.prompts])

    return load_with_teachers


def _with_teacher(prompt: Prompt, asked: AskedTeachers, path: Path) -> Prompt:
    column = asked.teacher_field
    assert column is not None
    name = prompt.info.get(column)
    if isinstance(name, str) and name in asked.teachers:
        return replace(prompt, teacher=teacher_role(name))
    problem = (
        f"is {describe(name)}, which names no teacher of the run" if column in prompt.info else "is missing"
    )
    raise InvalidConfig(
        f"column {column!r} {problem}",
        where=f"{path}, row {prompt.index + 1}",
        why=f"algorithm.{asked.asked_by}.teacher_field is {column}, and algorithm.{asked.asked_by}.teachers names "
        f"{', '.join(asked.teachers)}",
        next_step="give every row one of these names there, or set "
        f"algorithm.{asked.asked_by}.teacher_field to another column",
    )
