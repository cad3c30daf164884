"""How the data files of a run are read: prompts alone, or prompts with pairs of answers."""

from __future__ import annotations

from flotilla_coordinator.data.pairs import load_pairs
from flotilla_coordinator.data.prompt_teachers import choosing_teachers
from flotilla_coordinator.data.prompts import Load, load_prompts
from flotilla_core.config import PolicyConfig, RunConfig


def training_data(config: RunConfig) -> Load:
    """Of `data.train`; a client that makes the steps brings its pairs itself."""
    load = load_pairs if config.learns_from_pairs and config.loop == "coordinator" else load_prompts
    algorithm = config.algorithm
    asked = algorithm.asked_teachers if isinstance(algorithm, PolicyConfig) else None
    return load if asked is None or asked.teacher_field is None else choosing_teachers(load, asked)


def held_out_data(config: RunConfig) -> Load:
    """Of `evaluation.data`."""
    return load_pairs if config.evaluates_pairs else load_prompts
