"""The environments that come with the service."""

from __future__ import annotations

from flotilla_environment.builtin.calculator import Calculator
from flotilla_environment.builtin.dialogue import Dialogue
from flotilla_environment.builtin.frozen_lake import FrozenLake
from flotilla_environment.builtin.gymnasium import Gymnasium
from flotilla_environment.builtin.search import Search
from flotilla_environment.environment import Environment

BUILTIN: dict[str, type[Environment]] = {
    "calculator": Calculator,
    "dialogue": Dialogue,
    "frozen_lake": FrozenLake,
    "gymnasium": Gymnasium,
    "search": Search,
}
