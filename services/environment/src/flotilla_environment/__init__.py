"""Environment service: plays episodes of several turns. Environments of users import what they need from here."""

from __future__ import annotations

from flotilla_environment.environment import Begun, Call, Environment, Reply, Task, Turn
from flotilla_environment.tools import ToolEnvironment, called

__all__ = ["Begun", "Call", "Environment", "Reply", "Task", "ToolEnvironment", "Turn", "called"]
