"""The variables of the environment by which an agent finds the policy and its task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SESSION_URL, SESSION_KEY, TASK = "FLOTILLA_SESSION_URL", "FLOTILLA_SESSION_KEY", "FLOTILLA_TASK"
TASKS_URL, RUN_KEY = "FLOTILLA_TASKS_URL", "FLOTILLA_RUN_KEY"
AGENTS_KEY = "FLOTILLA_AGENTS_KEY"
"""The variable of the service with the key of agents that come by themselves."""
LONGEST_TASK = 100_000
"""The kernel takes no variable above 131,072 bytes; a longer task is had from the session alone."""


def of_session(url: str, key: str, turns_key: str, task: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of an agent that serves one session.

    What the clients of a vendor have asks for turns alone, because tools often inherit it.
    """
    text = json.dumps(task)
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": turns_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": turns_key,
        SESSION_URL: url,
        SESSION_KEY: key,
        TASK: text if len(text) <= LONGEST_TASK else "",
    }


def of_run(url: str, key: str) -> dict[str, str]:
    """Return the variables of an agent that takes one task after the other."""
    return {TASKS_URL: f"{url}/tasks/next", RUN_KEY: key}
