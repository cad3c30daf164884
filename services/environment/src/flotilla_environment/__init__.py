"""Environment service: plays episodes of several turns. Environments of users import what they need from here."""

from __future__ import annotations

from flotilla_environment.environment import Begun, Call, Environment, Program, Reply, Task, Turn
from flotilla_environment.tools import ToolEnvironment, called, python_tool

__all__ = [
    "Begun",
    "Call",
    "Environment",
    "Program",
    "Reply",
    "Task",
    "ToolEnvironment",
    "Turn",
    "called",
    "python_tool",
]
