"""Calls the function of a user with the task of an episode, as an agent's process.

Run as `python -m flotilla_environment.agents.function FILE NAME`. The function may be `async`. It finds the policy by
the variables of the environment, and may return rewards: numbers by name. In a process that takes many tasks it is
called for one after the other. What it raises is told with the line of the file, and ends its episode alone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flotilla_environment.agents.variables import RUN_KEY, SESSION_KEY, SESSION_URL, TASKS_URL, of_session
from flotilla_workers.functions import Target, described, user_function

OURS = (os.path.dirname(__file__),)
"""The folder with frames that no user wrote."""
LIMIT_S = 60.0


def main() -> None:
    file, name = sys.argv[1:3]
    function = user_function(Target("file", file, name))
    for task in _tasks():
        try:
            ended = _play(function, task)
        except Exception as error:  # noqa: BLE001 - code of the user raised it, and whoever plays is told
            said = described(error, OURS)
            ended = {"failure": said["failed"], "traceback": said["traceback"]}
        with suppress(urllib.error.HTTPError):  # The episode is over, whatever the function made of that.
            _asked("POST", f"{os.environ[SESSION_URL]}/end", os.environ[SESSION_KEY], ended)


def _tasks() -> Iterator[dict[str, Any]]:
    """Give the task of this process, or one task after the other, each with the variables of its session."""
    if TASKS_URL not in os.environ:
        yield _asked("GET", f"{os.environ[SESSION_URL]}/task", os.environ[SESSION_KEY])
        return
    while True:
        taken = _asked("GET", os.environ[TASKS_URL], os.environ[RUN_KEY])
        if taken:
            os.environ.update(of_session(taken["session"]["url"], taken["session"]["key"], taken["task"]))
            yield taken["task"]


def _play(function: Callable[..., Any], task: dict[str, Any]) -> dict[str, Any]:
    """Call the function; return what is told at the end of its episode."""
    given = function(task)
    if inspect.iscoroutine(given):
        given = asyncio.run(given)
    if isinstance(given, Mapping):
        _asked("POST", f"{os.environ[SESSION_URL]}/rewards", os.environ[SESSION_KEY], dict(given))
    elif given is not None:
        raise TypeError(f"{function.__name__} returned {given!r:.80}, expected None or rewards by name")
    return {}


def _asked(method: str, url: str, key: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=LIMIT_S) as said:
        text = said.read()
    return dict(json.loads(text)) if text else {}


if __name__ == "__main__":
    main()
