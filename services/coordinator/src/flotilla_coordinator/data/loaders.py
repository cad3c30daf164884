"""How the data files of a run are read: prompts alone, or prompts with pairs of answers."""

from __future__ import annotations

from flotilla_coordinator.data.pairs import load_pairs
from flotilla_coordinator.data.prompts import Load, load_prompts
from flotilla_core.config import RunConfig


def training_data(config: RunConfig) -> Load:
    """Of `data.train`; a client that makes the steps brings its pairs itself."""
    return load_pairs if config.learns_from_pairs and config.loop == "coordinator" else load_prompts


def held_out_data(config: RunConfig) -> Load:
    """Of `evaluation.data`."""
    return load_pairs if config.evaluates_pairs else load_prompts
