"""How the data files of a run are read: prompts alone, with pairs of answers, or with the teachers that they name.

Invariant: a run whose column of teachers is missing in a line, or names a teacher that the run does not ask, does not
start.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flotilla_coordinator.data.pairs import load_pairs
from flotilla_coordinator.data.prompts import Load, Prompt, PromptFile, load_prompts
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config import DataConfig, PolicyConfig, RunConfig
from flotilla_core.config.document import describe
from flotilla_core.config.teachers import AskedTeachers
from flotilla_core.errors import InvalidConfig
from flotilla_core.roles import teacher_role


def training_data(config: RunConfig) -> Load:
    """Of `data.train`; a client that makes the steps brings its pairs itself."""
    load = load_pairs if config.learns_from_pairs and config.loop == "coordinator" else load_prompts
    algorithm = config.algorithm
    asked = algorithm.asked_teachers if isinstance(algorithm, PolicyConfig) else None
    return load if asked is None or asked.teacher_field is None else _choosing_teachers(load, asked)


def held_out_data(config: RunConfig) -> Load:
    """Of `evaluation.data`."""
    return load_pairs if config.evaluates_pairs else load_prompts


def _choosing_teachers(load: Load, asked: AskedTeachers) -> Load:
    """`load`, and of every prompt the role of the teacher that scores its samples."""

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
