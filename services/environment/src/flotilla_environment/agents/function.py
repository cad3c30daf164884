"""Calls the function of a user with the task of an episode, as an agent's process.

Run as `python -m flotilla_environment.agents.function FILE NAME`. The function may be `async`. It finds the policy by
the variables of the environment, and may return rewards: numbers by name. In a process that takes many tasks it is
called for one after the other. What it raises is told with the line of the file, and ends its episode alone.

Invariant: no program that the function starts finds a key that gives rewards or takes tasks: what a policy writes may
run there.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from flotilla_environment.agents.variables import RUN_KEY, SESSION_KEY, SESSION_URL, TASKS_URL, of_session
from flotilla_workers.functions import Target, described, user_function

OURS = (os.path.dirname(__file__),)
"""The folder with frames that no user wrote."""
LIMIT_S = 60.0
PR_SET_DUMPABLE = 4
_Task: TypeAlias = tuple[str, str, dict[str, Any]]
"""The URL of a session, its key, and its task."""


def main() -> None:
    file, name = sys.argv[1:3]
    session_key, run_key = os.environ.pop(SESSION_KEY, ""), os.environ.pop(RUN_KEY, "")
    # The environment with which this process began, and its memory, are open to no process of the same user then.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    function = user_function(Target("file", file, name))
    for url, key, task in _taken(run_key) if run_key else _own(session_key):
        try:
            ended = _play(function, url, key, task)
        except Exception as error:  # noqa: BLE001 - code of the user raised it, and whoever plays is told
            said = described(error, OURS)
            ended = {"failure": said["failed"], "traceback": said["traceback"], "system": said.get("system")}
        with suppress(
            OSError, ValueError, AttributeError
        ):  # Its process may be ended before it writes what it printed.
            sys.stdout.flush()
        with suppress(urllib.error.HTTPError):  # The episode is over, whatever the function made of that.
            _asked("POST", f"{url}/end", key, ended)


def _own(key: str) -> Iterator[_Task]:
    """Give the task of this process."""
    url = os.environ[SESSION_URL]
    yield url, key, _asked("GET", f"{url}/task", key)


def _taken(run_key: str) -> Iterator[_Task]:
    """Give one task after the other, each with the variables of its session."""
    while True:
        taken = _asked("GET", os.environ[TASKS_URL], run_key)
        if taken:
            session, task = taken["session"], taken["task"]
            os.environ.update(of_session(session["url"], session["key"], session["turns_key"], task))
            del os.environ[SESSION_KEY]
            yield session["url"], session["key"], task


def _play(function: Callable[..., Any], url: str, key: str, task: dict[str, Any]) -> dict[str, Any]:
    """Call the function; return what is told at the end of its episode."""
    given = function(task)
    if inspect.iscoroutine(given):
        given = asyncio.run(given)
    if isinstance(given, Mapping):
        try:
            _asked("POST", f"{url}/rewards", key, dict(given))
        except urllib.error.HTTPError as error:
            why = json.loads(error.read())["error"]["message"]
            raise ValueError(f"{function.__name__} returned rewards that are refused: {why}") from None
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
